"""Properties of everything that reads bytes: the right value, or one sentence.

Nothing else, and no hang.

damage                what happens to a valid file: bits, bytes, parts of it, odd values in its JSON
test_configuration    YAML files and overrides
test_input_files      text to tokenise, of every kind; tokenizers
test_forms            every JSON file: a reader and a valid file of each, in one registry
test_models           foreign models: config.json, safetensors and its index; initial weights
test_run_files        records, TensorBoard's files, checkpoints, locks, what `compare` reads
test_settings         settings that go together: shown, planned, bounded, trained at any layout
test_shard_files      shards, and notes with a checksum

`make test` tries a few examples of each, always the same; `make fuzz` 10,000 of each, of a seed.
The trainings are marked `full`: `ORA_FUZZ_EXAMPLES=1000 pytest -m full tests/fuzz --timeout 0`.
"""
