"""What leaves the house: ONNX files and their measurement."""
