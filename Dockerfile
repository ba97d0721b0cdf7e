# The server on a CPU, without a compiler in the image: docs/serving.md, "In a container".
FROM python:3.12-slim AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN apt-get update && apt-get install --yes --no-install-recommends g++
WORKDIR /source
COPY . .
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" build .
# The wheel brings the engine `native`, compiled for every processor of this architecture.
RUN python tools/ship_kernels.py && python -m build --wheel

FROM python:3.12-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=bind,from=build,source=/source/dist,target=/dist \
    pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" "$(echo /dist/*.whl)[serve]"
RUN useradd --uid 1000 skipsearch && install --directory --owner=skipsearch /data
USER skipsearch
# Models, profiles and what the program stores for the next start.
VOLUME /data
WORKDIR /data
ENV HF_HOME=/data/huggingface SKIPSEARCH_CACHE_DIR=/data/cache
EXPOSE 8000
ENTRYPOINT ["skipsearch"]
CMD ["serve", "--model", "demo", "--profile", "auto", "--task", "pycode", "--host", "0.0.0.0"]
