# Etude with simulators, for the CPU or a GPU of the host:
#   docker build -t etude .
#   docker run --rm -v "$PWD/runs:/work/runs" etude quickstart
# Pip takes the stock build of torch, which brings CUDA; for a smaller image name an index that has CPU builds:
#   docker build --build-arg PIP_EXTRA_INDEX_URL=... -t etude .
FROM python:3.11-slim-bookworm AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE requirements.lock ./
COPY src src
COPY configs configs
RUN pip wheel --no-cache-dir --no-deps --constraint requirements.lock --wheel-dir /wheels .

FROM python:3.11-slim-bookworm
ARG EXTRAS=quickstart,sim
ARG PIP_EXTRA_INDEX_URL=
# For pictures and films: software OpenGL without a screen. Debian keeps no old versions that could be named.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libegl1 libegl-mesa0 libgl1-mesa-dri \
    && rm -rf /var/lib/apt/lists/*
COPY requirements.lock /tmp/requirements.lock
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    wheel="$(find /wheels -name 'etude-*.whl')" \
    && pip install --no-cache-dir --constraint /tmp/requirements.lock "${wheel}[${EXTRAS}]"
RUN useradd --create-home --uid 1000 etude && mkdir -p /work/runs && chown -R etude /work
USER 1000
WORKDIR /work
# One thread a process, as everywhere: threads that spin for shared cores cost several times the work.
ENV OMP_NUM_THREADS=1
ENTRYPOINT ["etude"]
CMD ["--help"]
