"""What a run shows and leaves behind: console, `metrics.jsonl`, TensorBoard, the run folder.

Standard library and rich only, TensorBoard when asked for. Rank 0 tracks; other ranks hold `NullTracker`s.
"""
