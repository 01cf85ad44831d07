# One image for both programs; deploy/compose.yaml starts both.
#
#   docker build --build-arg PIP_EXTRA_INDEX_URL=URL -t paceline .     # URL: the index with PyTorch's CPU builds
#   docker run -p 8000:8000 -e PACELINE_API_KEYS=KEY -v paceline:/var/lib/paceline paceline
#   docker run -it --network host -v device:/var/lib/paceline paceline paceline agent --cloud URL --code -
# python:3.11-slim with Python 3.11.16 on Debian 13, all architectures, as of 2026-08-16. For a newer one take the digest
# that `docker buildx imagetools inspect python:3.11-slim` prints, or build with --build-arg PYTHON=python:3.11-slim.
ARG PYTHON=python:3.11-slim@sha256:9c900dea9e8fb7e16277c179b555cc72d29a352dbc33cff48ad5a0412fd5bfc7
FROM ${PYTHON}

ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

WORKDIR /opt/paceline
# The large and rarely changing part first, in layers of its own: versions and hashes, written by scripts/lock.
# PyTorch's usual build comes with what a GPU needs; the extra index has its builds for CPUs.
COPY deploy/requirements.lock deploy/cuda.lock deploy/cpu.lock ./
RUN pip install --no-deps --require-hashes --requirement requirements.lock
RUN if [ -n "$PIP_EXTRA_INDEX_URL" ]; then torch=cpu; else torch=cuda; fi \
    && pip install --no-deps --require-hashes --requirement "$torch.lock"
COPY pyproject.toml setup.py README.md LICENSE ./
COPY paceline paceline
COPY server server
COPY device_agent device_agent
COPY client client
COPY bench bench
# The compiler builds the kernel that samples, and is not needed later; llama.cpp needs libgomp.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev libgomp1 \
    && pip install --no-deps --no-build-isolation . \
    && apt-get purge --yes --auto-remove gcc libc6-dev && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 paceline \
    && install --directory --owner paceline --mode 0700 /var/lib/paceline
USER paceline
WORKDIR /home/paceline

# Each side has its own folder in the volume, beside the models that were downloaded.
ENV PACELINE_STATE_DIR=/var/lib/paceline HF_HOME=/var/lib/paceline/models
VOLUME /var/lib/paceline
EXPOSE 8000 8001
# The server, or an agent, or both: ready when one that runs here is.
HEALTHCHECK --interval=30s --timeout=20s --start-period=120s --retries=3 CMD ["paceline", "status", "--ready"]
ENTRYPOINT []
# Reachable from outside the container, so it does not start without a key. An agent listens on its own loopback address
# and needs none; `--network host` makes that the machine's.
CMD ["paceline", "serve", "--host", "0.0.0.0"]
