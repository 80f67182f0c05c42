"""The method: frozen per-head orthonormal Query/Key projections. Read `attention` first.

What is frozen, and how it is drawn
    policy        a variant as data: initial values, what trains, which layers and heads
    axes          how one axis of it is declared
    recipes       policy and sizes -> how its bank or scores are drawn
    layers        `4-7` or `50%-100%` -> layer numbers; which heads a fraction of them is
    unfreeze      layers that become trainable on the way, phase by phase
    orthonormal   (seed, layer, role, head) -> rows in float64, by
    exact           a QR whose bits depend on no BLAS, and
    structured      signed rows of Hadamard and cosine matrices, and
    factors         two sets of small blocks for a whole layer
    given         initial values from a file: those of a model that was trained before
    bank          a recipe's rows, drawn or given
    shards        which heads a tensor-parallel rank owns, its rows, their digests
    score_recipe  the score matrices of a Synthesizer

The layers
    attention     frozen queries and keys, trainable values, one collective each way
    adapters      small trainable corrections of frozen queries and keys
    penalty       trainable queries and keys that are kept nearly orthonormal
    synthesizer   scores that do not look at the tokens
    scores        scores -> context vectors, for all that have queries and keys
    documents     the same for documents that must not see each other
    output        logits, and cross-entropy without a copy of them in fp32
    layer         attention and MLP behind their norms; compiled, recomputed
    linear        megatron-core's parallel layers, which a compiler can trace, by
    products        several products of one input,
    monarch         those with the small blocks of structured rows, and
    collectives     what they exchange
    recompute     activations made again in backward, or queries and keys alone
    random_streams  what dropout draws from
    norm          LayerNorm under sequence parallelism
    auxiliary     terms that layers add to the loss

From a policy to a training
    gpt           megatron-core's GPTModel with that output
    install       policy -> megatron-core's spec of the layers
    initialize    initial values of what trains, by
    streams         a random stream for each row of each weight
    freeze        what DeepSpeed may see, and the audit that proves it
    heads         what the heads of a finished model do
    compat        megatron-core's version, and what it needs on a CPU
"""
