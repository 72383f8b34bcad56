FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap git && rm -rf /var/lib/apt/lists/*
WORKDIR /app
COPY setup.cfg pyproject.toml README.md LICENSE ./
COPY polar polar
COPY workers workers
COPY migrations migrations
COPY templates templates
COPY docker docker
RUN pip install --no-cache-dir .
ENV OPENBLAS_NUM_THREADS=1
EXPOSE 8080 8100
CMD ["polar", "--help"]
