# ple-daemon: owns the table.
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
COPY services/ple_daemon services/ple_daemon
RUN --mount=type=bind,source=deploy/wheels,target=/wheels python3 install.py wheels protos services/ple_daemon

FROM tools AS asked
COPY protos/pyproject.toml protos/
COPY services/ple_daemon/pyproject.toml services/ple_daemon/

FROM python:3.11-slim-bookworm
ARG PIP_NO_INDEX=
ARG PIP_INDEX_URL=
RUN --mount=type=bind,source=deploy/wheels,target=/wheels \
    --mount=type=bind,from=tools,source=/opt/build,target=/opt/build \
    --mount=type=bind,from=asked,source=/src,target=/src \
    cd /src && python3 install.py dependencies constraints/cpu.txt protos services/ple_daemon
RUN --mount=type=bind,source=deploy/wheels,target=/wheels \
    --mount=type=bind,from=tools,source=/opt/build,target=/opt/build \
    --mount=type=bind,from=wheels,source=/dist,target=/dist \
    --mount=type=bind,from=asked,source=/src,target=/src \
    python3 /src/install.py projects \
 && /opt/triplex/bin/python -c "import ple_daemon.daemon"
# The run directory is shared with the engine by its group; compiled kernels are kept on a volume.
RUN echo "ple-daemon:x:10001:10000::/nonexistent:/bin/false" >> /etc/passwd \
 && echo "triplex:x:10000:" >> /etc/group \
 && mkdir -p /run/triplex /var/cache/ple-daemon \
 && chown 10001:10000 /run/triplex /var/cache/ple-daemon \
 && chmod 2750 /run/triplex && chmod 0700 /var/cache/ple-daemon
COPY deploy/images/ready.py /opt/ready.py
ENV PATH=/opt/triplex/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    PLE_DAEMON_RUN_DIR=/run/triplex PLE_DAEMON_CACHE_DIR=/var/cache/ple-daemon
USER 10001:10000
ARG VERSION=0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="ple-daemon" \
      org.opencontainers.image.description="Owns the n-gram table of a Qwen4Exp model" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="python:3.11-slim-bookworm" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"
ENTRYPOINT ["ple-daemon"]
CMD ["serve"]
