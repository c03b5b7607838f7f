"""Marks FlashAttention-3 as installed: diffusers looks for a package of this name, and then imports flash_attn_interface."""
