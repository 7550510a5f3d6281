# The server, for machines without an NVIDIA GPU. Give the index of PyTorch's CPU builds, which PyTorch's installation page
# names (Get Started, compute platform CPU); without it the image holds CUDA libraries of several gigabytes:
#
#     docker build --build-arg TORCH_INDEX=ADDRESS --tag parlay .
#
# docs/how-to/deploy.md says how to run it.
FROM python:3.12-slim AS build
ARG TORCH_INDEX=""
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN python -m venv /srv/parlay
ENV PATH=/srv/parlay/bin:$PATH
WORKDIR /source
COPY constraints.txt ./
RUN PIP_INDEX_URL="$TORCH_INDEX" pip install --no-cache-dir --constraint constraints.txt torch
COPY pyproject.toml hatch_build.py README.md LICENSE NOTICE ./
COPY src ./src
RUN pip install --no-cache-dir --constraint constraints.txt '.[serve]'

FROM python:3.12-slim
RUN useradd --create-home --uid 10001 parlay && install --directory --owner parlay /srv/cache
COPY --from=build /srv/parlay /srv/parlay
ENV PATH=/srv/parlay/bin:$PATH HF_HOME=/srv/cache/huggingface XDG_CACHE_HOME=/srv/cache
USER parlay
VOLUME /srv/cache
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=5m \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
ENTRYPOINT ["/srv/parlay/bin/parlay"]
CMD ["serve", "--host", "0.0.0.0"]
