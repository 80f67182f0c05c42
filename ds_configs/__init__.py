"""DeepSpeed settings, one JSON per ZeRO stage; README.md says why each key is there."""
