"""The parts of `experiments/benchmark.py`; nothing here imports TensorFlow on import."""
