"""Finished runs, read back from their directories without torch.

finished   a finished run as one record, and its summary
agreement  refusal of a finished run whose files contradict each other
"""
