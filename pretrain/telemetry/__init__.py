"""What a run says of itself while it trains; on rank 0 only.

telemetry   a step's record -> metrics.jsonl, TensorBoard, console
event_file  TensorBoard's file
hparams     TensorBoard's HParams page
console     progress on a terminal, plain lines in a log
"""
