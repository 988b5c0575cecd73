"""What a method costs: passes through the network, bytes, seconds.

subject   a method on a small model and random images, set up so that it does all of its work
passes    forward and backward passes of a client, counted as operations that were executed
traffic   bytes down and up, from the types of the process
timing    seconds per client, all methods in turn
without_tff  a round of each method without TFF
table     the three beside the paper's figures
"""
