# docker build -t pyspec .                                              CPUs, chosen at run time
# docker build -t pyspec --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04 --build-arg RUN=nvidia/cuda:13.0.1-runtime-ubuntu24.04 --build-arg ARCH="80;86;89;90;120" .
# docker run -p 8080:8080 -v ~/models:/models pyspec serve -m /models/target.gguf
ARG BASE=ubuntu:24.04
ARG RUN=ubuntu:24.04

FROM ${BASE} AS build
ARG ARCH=
RUN apt-get update && apt-get install -y --no-install-recommends g++ git make python3-dev python3-venv && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN make wheel ARCH="${ARCH}"

FROM ${RUN}
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 python3-venv && rm -rf /var/lib/apt/lists/* && python3 -m venv /opt/pyspec
COPY --from=build /src/dist/*.whl /tmp/
RUN wheel=$(ls /tmp/*.whl) && /opt/pyspec/bin/pip install --no-cache-dir "${wheel}[serve,hub]" && rm /tmp/*.whl
ENV PATH=/opt/pyspec/bin:$PATH
USER ubuntu
EXPOSE 8080
ENTRYPOINT ["pyspec"]
CMD ["serve", "--host", "0.0.0.0"]
