"""Inputs: where text comes from, and how documents are read from it.

formats     endings of file names, kinds of content, packings
discovery   files and objects that are read, and every entry that is not
records     readers of documents, and of the lines that are not documents
encodings   bytes as text, and the likely encoding of bytes that are not UTF-8
containers  bytes and lines of plain and packed files
cutting     long texts cut into documents
sampling    samples of documents by the hash of their text
remote      objects of a store as inputs, streams of their bytes
stores      requests to s3, https and the hub
hub         corpora that `download` knows, downloads from the hub, download.json
"""
