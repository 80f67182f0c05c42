"""Inputs: where text comes from, and how documents are read from it.

discovery   files and objects that are read, every entry that is not, pieces, chunks of a large corpus
records     readers of documents, and of the lines that are none
containers  lines of plain and packed files
sampling    samples of documents by the hash of their text
remote      objects of a store as inputs, streams of their bytes
stores      requests to s3, gs, https and the hub
hub         corpora that `download` knows, downloads from the hub or a mirror, download.json
"""
