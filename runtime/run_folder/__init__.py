"""The folder of a run: whose it is, who writes there now, and what may be deleted in it.

identity    which run and which folder: in the folder, in every checkpoint and in every state replica
lock        one run at a time
owned       the only place that deletes folders, and deletes none that does not carry our mark
private     files and folders for their owner alone
process     which process that is, also after its number was given to another one
"""
