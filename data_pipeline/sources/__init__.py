"""Inputs: where text comes from, and how documents are read from it.

discovery   files and objects that are read, every entry that is not, pieces, chunks of a large corpus
records     readers of documents, and of the lines that are none
containers  lines of plain and packed files
sampling    samples of documents by the hash of their text
remote      objects of a store as inputs, streams of their bytes
stores      requests to s3, gs, https and the hub
hub         downloads from the Hugging Face hub or a mirror
catalogue   corpora that `download` knows
origin      download.json: repository, commit and files of a download
"""
