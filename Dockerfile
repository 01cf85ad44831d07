# One image for both programs. The default is the server; `docker run -it ... paceline agent --cloud URL --code -` is a device.
#
#   docker build --build-arg PIP_EXTRA_INDEX_URL=URL -t paceline .     # URL: the index with PyTorch's CPU builds
#   docker run -p 8000:8000 -e PACELINE_API_KEYS=KEY -v paceline:/var/lib/paceline paceline
FROM python:3.11-slim

ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

# The large and rarely changing part first, in a layer of its own. The pin is that of pyproject.toml.
RUN pip install "torch>=2.13,<2.14"

WORKDIR /opt/paceline
COPY pyproject.toml README.md LICENSE ./
COPY paceline paceline
COPY server server
COPY device_agent device_agent
COPY client client
COPY bench bench
RUN pip install . && useradd --create-home --uid 1000 paceline \
    && install --directory --owner paceline --mode 0700 /var/lib/paceline
USER paceline
WORKDIR /home/paceline

# Reachable from outside the container, so it does not start without PACELINE_API_KEYS.
ENV PACELINE_HOST=0.0.0.0 PACELINE_PORT=8000 PACELINE_STATE_DIR=/var/lib/paceline
VOLUME /var/lib/paceline
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=120s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/readyz', timeout=2)"]
ENTRYPOINT []
CMD ["paceline", "serve"]
