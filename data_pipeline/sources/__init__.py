"""Inputs: where text comes from, and how documents are read from it.

formats     endings of file names, kinds of content, packings
discovery   files and shards that are read, and every entry that is not
data_sets   data sets that the package `datasets` opens, and their shards
records     readers of documents, and of the lines that are not documents
encodings   bytes as text, and the likely encoding of bytes that are not UTF-8
containers  bytes and lines of plain and packed files
cutting     long texts cut into documents
sampling    samples of documents by the hash of their text
hub         corpora that `download` knows, downloads from the hub, download.json
"""
