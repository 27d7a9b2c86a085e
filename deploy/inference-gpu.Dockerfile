# ple-inference with vLLM, on GPUs: the released image of vLLM, unmodified, and our two wheels.
# It has never been built where Triplex is tested, which reaches no image registry: docs/operations.md.
FROM vllm/vllm-openai:v0.33.0 AS build
ARG PIP_NO_INDEX=
ARG PIP_INDEX_URL=
WORKDIR /src
COPY constraints constraints
COPY deploy/images/pins.py .
COPY protos protos
COPY services/inference services/inference
RUN --mount=type=bind,source=deploy/wheels,target=/wheels --mount=type=cache,target=/root/.cache/pip \
    python3 -m pip install --quiet --find-links /wheels -r constraints/build.txt \
 && python3 -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /dist protos services/inference

FROM vllm/vllm-openai:v0.33.0
# What vLLM's image lacks is installed in the versions of our lock; what it has stays as it is.
RUN --mount=type=bind,from=build,source=/src,target=/src --mount=type=bind,from=build,source=/dist,target=/dist \
    python3 /src/pins.py /src/constraints/vllm.txt > /tmp/pins.txt \
 && python3 -m pip install --quiet --no-cache-dir -c /tmp/pins.txt /dist/*.whl \
 && rm /tmp/pins.txt
RUN echo "ple-inference:x:10002:10000::/nonexistent:/bin/false" >> /etc/passwd \
 && echo "triplex:x:10000:" >> /etc/group \
 && mkdir -p /run/triplex /var/cache/triplex \
 && chown 10001:10000 /run/triplex && chmod 2750 /run/triplex \
 && chown 10002:10000 /var/cache/triplex && chmod 0700 /var/cache/triplex
COPY deploy/images/ready.py /opt/ready.py
# Compiled kernels are kept on a volume.
ENV PYTHONUNBUFFERED=1 HOME=/var/cache/triplex XDG_CACHE_HOME=/var/cache/triplex
USER 10002:10000
ARG VERSION=0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="ple-inference-gpu" \
      org.opencontainers.image.description="vLLM 0.33.0 with the Triplex plugin" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="vllm/vllm-openai:v0.33.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"
ENTRYPOINT ["ple-inference"]
CMD ["serve", "--engine", "vllm"]
