# zlaunch from Debian and PyPI packages.
#   docker build -t zlaunch .                                        # torch with CUDA
#   docker build -t zlaunch --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
#   docker run --rm --gpus all --ipc=host -v "$PWD:/work" zlaunch --num_gpus 2 train.py
FROM debian:12-slim

# g++ compiles the CPU kernels, ssh connects to other nodes, procps has ps and top
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates g++ openssh-client procps python3 python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*

ARG EXTRAS=hf,ui
ARG TORCH_INDEX=
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
RUN python3 -m venv /opt/venv

# Install torch first: its layer stays cached when the sources change
COPY constraints.txt /src/
RUN pip install -c /src/constraints.txt ${TORCH_INDEX:+--index-url $TORCH_INDEX --extra-index-url https://pypi.org/simple} torch

COPY . /src
RUN pip install -c /src/constraints.txt "/src[$EXTRAS]" && zlaunch --version

RUN useradd --create-home user && mkdir /work && chown user /work
USER user
WORKDIR /work
ENTRYPOINT ["zlaunch"]
