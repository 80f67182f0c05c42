"""The experiments of `python -m pretrain evaluate`: heads, lengths, approximation, downstream tasks.

diversity, length, approximation   each with its NAME_report
attention_maps     a picture beside diversity's numbers
groups, measures, trained_model    what they share
tasks              models on lm-evaluation-harness's tasks, and what is kept of it
task_index         which task files, and whether their data can be had
harness            the harness itself
task_scores        what it says of a model
subjects           runs and exports, as models
task_statistics    gaps over seeds, McNemar's test over items
task_report, task_tables   how that is shown
report, work, verbs, tasks_verb    the form of reports, progress, the command line
"""
