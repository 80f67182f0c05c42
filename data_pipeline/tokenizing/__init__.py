"""Documents to shards, in parallel and resumable.

run           run of tokenize, whole or as one task of many; finishing of a directory
verbs         command-line verbs `tokenize` and `merge-manifests`
plan          options, inputs, units of work, and plan.json
work_unit     worker that makes a unit and writes its record
encode_unit   encoding of a unit's documents, with checks of the ids
unit_files    file with the ids of a unit, until they are in shards
assemble      units to shards, rejects.jsonl and the manifest
rejects       limits on rejected lines and damaged files
source_check  comparison of finished shards with their source text
"""
