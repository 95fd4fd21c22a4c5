"""From sources to batches: each part takes the one above it, and says what it saves so that a resume is
exact.

    Source        data/sources    sample of (index, epoch), no hidden state              saves nothing
      |  Sample: text, pictures, regions in order
    encode        encode.py       ids, loss weights, uint8 patches; pictures decoded here       nothing
      |  Encoded: one document
    Stream        lane.py         documents of one source in shuffled order,             cursor, first token
      |  a piece of at most `length` tokens     long ones cut at line ends               of the next piece
    Lane          lane.py         one micro-batch of every step: sources by their        mixture account, pool
      |                           shares (order.py), a pool of pieces to choose from   as references
    pack          encode.py       the pieces that fill `tokens` positions best,                 nothing
      |  PackedBatch              side by side, each its own segment
    Feed          loader.py       the lanes of a rank ahead of time, by nobody, a        the state travels
      |  Step                     thread or processes: the same steps in any case        with the batch
    Loader        loader.py       one step at a time; merges, checks and restores        the lanes' states,
                                  states; counts what came out                what they belong to

Lane j of L reads every L-th document of each source's shuffled epochs, so what a step trains on depends on
the seed and the number of lanes, never on ranks, processes or threads (order.py: the shuffle is computed).
"""
