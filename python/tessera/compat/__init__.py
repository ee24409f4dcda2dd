"""Other libraries' functions, computed by Tessera: the same names, arguments and results.

    from tessera.compat.flash_attn import flash_attn_func, flash_attn_varlen_func
    from tessera.compat.flash_attn.bert_padding import pad_input, unpad_input

Importing this package alone imports neither of them, nor PyTorch.
"""
