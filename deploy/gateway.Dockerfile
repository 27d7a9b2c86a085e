# ple-gateway: the only service that clients reach.
# Built from the top of the checkout, as compose.cpu.yaml does.
FROM python:3.11-slim-bookworm AS tools
ARG PIP_NO_INDEX=
ARG PIP_INDEX_URL=
WORKDIR /src
COPY constraints constraints
COPY deploy/images/install.py .
RUN --mount=type=bind,source=deploy/wheels,target=/wheels python3 install.py tools

FROM tools AS wheels
COPY services/gateway services/gateway
RUN --mount=type=bind,source=deploy/wheels,target=/wheels python3 install.py wheels services/gateway

FROM tools AS asked
COPY services/gateway/pyproject.toml services/gateway/

FROM python:3.11-slim-bookworm
ARG PIP_NO_INDEX=
ARG PIP_INDEX_URL=
RUN --mount=type=bind,source=deploy/wheels,target=/wheels \
    --mount=type=bind,from=tools,source=/opt/build,target=/opt/build \
    --mount=type=bind,from=asked,source=/src,target=/src \
    cd /src && python3 install.py dependencies constraints/cpu.txt services/gateway
RUN --mount=type=bind,source=deploy/wheels,target=/wheels \
    --mount=type=bind,from=tools,source=/opt/build,target=/opt/build \
    --mount=type=bind,from=wheels,source=/dist,target=/dist \
    --mount=type=bind,from=asked,source=/src,target=/src \
    python3 /src/install.py projects \
 && /opt/triplex/bin/python -c "import ple_gateway.server"
RUN echo "ple-gateway:x:10003:10003::/nonexistent:/bin/false" >> /etc/passwd \
 && echo "ple-gateway:x:10003:" >> /etc/group
COPY deploy/images/ready.py /opt/ready.py
ENV PATH=/opt/triplex/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10003:10003
ARG VERSION=0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="ple-gateway" \
      org.opencontainers.image.description="OpenAI's and Anthropic's APIs in front of an inference service" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="python:3.11-slim-bookworm" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"
ENTRYPOINT ["ple-gateway"]
CMD ["serve"]
