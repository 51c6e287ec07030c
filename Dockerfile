# syntax=docker/dockerfile:1
#
# docker build --target router .        one router replica (the default), or with the command
#                                       `kvroute picker` one that gateways ask; needs REDIS_URL
# docker build --target worker .        one worker, with the simulated engine; needs REDIS_URL
#     with --build-arg WORKER_EXTRA=torch, with the torch engine as well
# docker build --target agent .         the agent beside a vLLM or SGLang; needs REDIS_URL and
#                                       KVROUTE_ENGINE_URL
# docker build --target planner .       keeps the fleet's size; needs REDIS_URL
# docker build --target all-in-one .    Redis, routers, balancer and workers in one container, to
#                                       try out: only clients inside it can reach its workers

ARG WORKER_EXTRA=worker
# torch's CPU build. With a GPU: --build-arg TORCH_INDEX=https://pypi.org/simple
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

FROM python:3.12.12-slim-bookworm AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /venv
WORKDIR /src
COPY . .

FROM build AS build-router
RUN --mount=type=cache,target=/root/.cache/pip \
    /venv/bin/pip install -c constraints.txt '.[gateway,otel]'

FROM build AS build-worker
ARG WORKER_EXTRA
ARG TORCH_INDEX
RUN --mount=type=cache,target=/root/.cache/pip \
    /venv/bin/pip install -c constraints.txt --extra-index-url "$TORCH_INDEX" ".[$WORKER_EXTRA]"

FROM build AS build-agent
RUN --mount=type=cache,target=/root/.cache/pip \
    /venv/bin/pip install -c constraints.txt '.[worker,discovery]'

FROM build AS build-planner
RUN --mount=type=cache,target=/root/.cache/pip \
    /venv/bin/pip install -c constraints.txt '.[planner]'

FROM build AS build-all-in-one
RUN --mount=type=cache,target=/root/.cache/pip \
    /venv/bin/pip install -c constraints.txt '.[worker,embedded,loadtest,planner]'

FROM python:3.12.12-slim-bookworm AS base
# Of a release, what `make release` says.
ARG VERSION=0.0.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title=kvroute \
    org.opencontainers.image.description="A KV-cache-aware router for LLM engines" \
    org.opencontainers.image.licenses=Apache-2.0 \
    org.opencontainers.image.version=$VERSION \
    org.opencontainers.image.revision=$REVISION
# A numeric user, so that Kubernetes can see that it is not root.
RUN useradd --create-home --uid 10001 kvroute
WORKDIR /home/kvroute
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1

FROM base AS worker
COPY --from=build-worker /venv /venv
USER 10001
ENV KVROUTE_HOST=0.0.0.0 KVROUTE_PORT=8081
EXPOSE 8081
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s \
    CMD ["python", "-m", "deploy.healthcheck", "KVROUTE_PORT"]
CMD ["kvroute", "worker"]

FROM base AS agent
COPY --from=build-agent /venv /venv
USER 10001
ENV KVROUTE_HOST=0.0.0.0 KVROUTE_PORT=8082
EXPOSE 8082
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s \
    CMD ["python", "-m", "deploy.healthcheck", "--tcp", "KVROUTE_PORT"]
CMD ["kvroute", "agent"]

FROM base AS planner
COPY --from=build-planner /venv /venv
USER 10001
ENV KVROUTE_HOST=0.0.0.0 KVROUTE_PORT=8083
EXPOSE 8083
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s \
    CMD ["python", "-m", "deploy.healthcheck", "--tcp", "KVROUTE_PORT"]
CMD ["kvroute", "planner"]

FROM base AS all-in-one
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends haproxy redis-server \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build-all-in-one /venv /venv
USER 10001
ENV KVROUTE_BALANCER_HOST=0.0.0.0 KVROUTE_BALANCER_PORT=8080
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s \
    CMD ["python", "-m", "deploy.healthcheck", "KVROUTE_BALANCER_PORT"]
CMD ["kvroute", "up"]

# Last, because a build without --target makes the last stage.
FROM base AS router
COPY --from=build-router /venv /venv
USER 10001
ENV KVROUTE_HOST=0.0.0.0 KVROUTE_PORT=8080
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s \
    CMD ["python", "-m", "deploy.healthcheck", "KVROUTE_PORT"]
CMD ["kvroute", "router"]
