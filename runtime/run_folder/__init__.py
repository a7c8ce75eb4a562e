"""The folder of a run: which run owns it, which process writes there now, and what may be deleted in it.

identity    which run and which folder: stored in the folder, in every checkpoint and in every state replica
lock        one run at a time
owned       the only code that deletes folders; it deletes none without our mark
private     files and folders for their owner alone
process     identifies a process, also after its number was reused
"""
