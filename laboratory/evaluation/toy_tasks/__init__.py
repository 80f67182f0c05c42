"""Tasks that a model learns in a minute: they show that a generated text gets the right score.

toy_translation       the language, its sentences, the text to train on; `toy_translation.yaml` is
                      the task of lm-evaluation-harness
"""
