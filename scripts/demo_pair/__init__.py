"""Helpers of scripts/train_demo_pair.py: corpus, target model, drafter and GGUF export."""
