"""Attention modules.

projections  frozen queries and keys, trainable values, one collective each way
head_rows    frozen rows, trained rows and adapters of a layer's queries and keys
products     several products of one input in one autograd function
adapters     formulas of small trainable corrections of queries, keys and values
convolution  a short look back of each channel, within samples and documents
rotary       rotary positions of queries and keys
scores       queries, keys, values -> context vectors, by fused kernels
synthesizer  attention whose scores do not depend on the tokens
module       frozen queries and keys as a plain module of torch, for anybody's model
heads        effective matrices and attention distributions of a trained model's heads
"""
