"""What a block holds for its backward, by the paper."""


def activation_bytes(config, sequences, element_size, tp=1, recompute="none"):
    """What backward needs of one block's forward, for `sequences` full contexts: bytes a rank. recompute: as of the model.

    Korthikanti et al. 2022, arXiv:2205.05198, section 4, s b h (10 + 24/t) for GPT in 16 bits, less the dropout masks (ours
    are made again) and the attention scores (flash attention keeps none): inputs and outputs of both norms are whole, the
    heads' q, k, v and result and the MLP's hidden values are split.
    """
    head_size = config.width // config.heads
    whole = 4 * config.width
    mlp = (4 if config.mlp == "swiglu" else 2) * config.hidden
    if recompute == "block":
        return sequences * config.context * config.width * element_size
    if recompute == "selective":  # without one norm's output or both, and what lies between up and down
        whole -= (1 if config.experts or config.mlp == "swiglu" else 2) * config.width
        mlp //= 2
    if config.experts:  # each token's k rows as they go in and come out, and what lies between
        whole, mlp = whole + 3 * config.top_k * config.width, mlp * (config.top_k + config.shared)
    split = (2 * config.heads + 2 * config.kv_heads) * head_size + mlp
    return sequences * config.context * (whole + split / tp) * element_size
