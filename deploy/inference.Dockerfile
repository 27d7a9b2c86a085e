# ple-inference with the reference engine, on CPUs.
# Built from the top of the checkout, as compose.cpu.yaml does.
FROM python:3.11-slim-bookworm AS tools
ARG PIP_NO_INDEX=
ARG PIP_INDEX_URL=
WORKDIR /src
COPY constraints constraints
COPY deploy/images/install.py .
RUN --mount=type=bind,source=deploy/wheels,target=/wheels python3 install.py tools

FROM tools AS wheels
COPY protos protos
COPY services/inference services/inference
RUN --mount=type=bind,source=deploy/wheels,target=/wheels python3 install.py wheels protos services/inference

FROM tools AS asked
COPY protos/pyproject.toml protos/
COPY services/inference/pyproject.toml services/inference/

FROM python:3.11-slim-bookworm
ARG PIP_NO_INDEX=
ARG PIP_INDEX_URL=
RUN --mount=type=bind,source=deploy/wheels,target=/wheels \
    --mount=type=bind,from=tools,source=/opt/build,target=/opt/build \
    --mount=type=bind,from=asked,source=/src,target=/src \
    cd /src && python3 install.py dependencies constraints/cpu.txt protos 'services/inference[reference]'
RUN --mount=type=bind,source=deploy/wheels,target=/wheels \
    --mount=type=bind,from=tools,source=/opt/build,target=/opt/build \
    --mount=type=bind,from=wheels,source=/dist,target=/dist \
    --mount=type=bind,from=asked,source=/src,target=/src \
    python3 /src/install.py projects \
 && /opt/triplex/bin/python -c "import ple_inference.reference.service, ple_inference.reference.api.app"
# /models belongs to the daemon's user: the tiny model is made as that user, who then owns the table's files.
RUN echo "ple-inference:x:10002:10000::/nonexistent:/bin/false" >> /etc/passwd \
 && echo "triplex:x:10000:" >> /etc/group \
 && mkdir -p /run/triplex /models \
 && chown 10001:10000 /run/triplex /models \
 && chmod 2750 /run/triplex
COPY deploy/images/ready.py /opt/ready.py
ENV PATH=/opt/triplex/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
USER 10002:10000
ARG VERSION=0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="ple-inference" \
      org.opencontainers.image.description="Serves a Qwen4Exp model on CPUs; its n-gram rows come from ple-daemon" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="python:3.11-slim-bookworm" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"
ENTRYPOINT ["ple-inference"]
CMD ["serve"]
