"""What leaves the house: ONNX files and their measurement."""

import os

# onnxruntime from 1.29 on reports names and hashes of models to its makers unless it is told not
# to before it is imported; this program uses the network only for what it was asked to fetch.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
