# Two images from one wheel: `docker build --target cuda -t piper:cuda .`, or `--target cpu`. docs/container.md has the rest.

FROM python:3.11.13-slim-bookworm AS wheel
WORKDIR /source
RUN pip install --no-cache-dir setuptools==80.9.0
COPY pyproject.toml README.md LICENSE ./
COPY piper ./piper
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

# Processes on the host's cores. torch from its own index: the wheel on PyPI carries gigabytes of CUDA.
FROM python:3.11.13-slim-bookworm AS cpu
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
COPY constraints.txt /tmp/constraints.txt
COPY --from=wheel /wheels /tmp/wheels
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt --index-url https://download.pytorch.org/whl/cpu torch \
    && pip install --no-cache-dir --constraint /tmp/constraints.txt "$(echo /tmp/wheels/*.whl)[hf,ray,train]" \
    && useradd --create-home --uid 1000 piper
USER 1000
WORKDIR /home/piper
ENTRYPOINT ["piper"]
CMD ["--help"]

# GPUs. The wheels of torch carry CUDA and NCCL, the host gives the driver. Not slim: `--compile` calls a C compiler.
FROM python:3.11.13-bookworm AS cuda
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
COPY constraints.txt /tmp/constraints.txt
COPY --from=wheel /wheels /tmp/wheels
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt "$(echo /tmp/wheels/*.whl)[gpu,hf,ray,train]" \
    && useradd --create-home --uid 1000 piper
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
WORKDIR /home/piper
ENTRYPOINT ["piper"]
CMD ["--help"]
