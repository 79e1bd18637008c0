"""What proposes tokens: values behind `decode.proposer.Proposer`, one file each.

Nothing in `decode` imports this room; `startup` chooses a drafter and hands it over.
"""
