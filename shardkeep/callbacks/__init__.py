"""Jobs in TensorBoard, and rows in the checkpoints of other libraries' trainers.

Each module needs its library, which is no dependency.
"""
