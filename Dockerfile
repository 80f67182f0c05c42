# ora-pretrain for the CPU or for CUDA:  docker build --build-arg TORCH=cpu|cuda --tag ora-pretrain:cpu .
# How to run it, and what was tried: docs/containers.md
FROM python:3.11-slim-bookworm

ARG TORCH=cpu
ARG TORCH_VERSION=2.13.0
ARG GIT_COMMIT=

# For NCCL over InfiniBand. Debian keeps no older versions to pin.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ibverbs-providers libibverbs1 librdmacm1 \
    && rm -rf /var/lib/apt/lists/*

# torch first: the layer that is large and changes least. With CUDA it brings its own CUDA and NCCL.
RUN if [ "$TORCH" = cpu ]; then index=https://download.pytorch.org/whl/cpu; else index=https://pypi.org/simple; fi \
    && pip install --no-cache-dir "torch==$TORCH_VERSION" --index-url "$index"

WORKDIR /opt/ora
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY data_pipeline data_pipeline
COPY ds_configs ds_configs
COPY megatron_patches megatron_patches
COPY pretrain pretrain
COPY laboratory laboratory
RUN pip install --no-cache-dir --constraint constraints.txt '.[compare,export]'
# The checkout's .git is not in the image; environment.json of a run names the commit in this file.
RUN printf '%s\n' "$GIT_COMMIT" > "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/git_commit"

RUN useradd --create-home --uid 1000 ora && mkdir /work && chown ora /work
USER 1000
WORKDIR /work
ENV PYTHONUNBUFFERED=1
ENTRYPOINT ["ora-pretrain"]
CMD ["--help"]
