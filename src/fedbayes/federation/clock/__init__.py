"""Simulated time: how long clients take, when they are there, and asynchronous rounds.

`Queue` decides by the clock whose reports a round takes, before anyone trains. So seconds must
never depend on anything that training finds, nor may the length of a report
(`ServerMessages.lengths`); in a synchronous round the lengths are known when it is over
(`runs/turns.py`). New models of speed and availability are welcome here; engines know no clock.

An asynchronous round takes the reports that come first. Each of its tasks has the message of the
state from which its client started (`VersionedMessages`). Only those states of the server wait on
disk, one file each (`storage/server_history.py`). `stages/stale.py` brings an older report up to
date before bounds, rules and the method see it. Over a network the first reply is the first report
(`Live`, `flower/asynchronous.py`), and clients stay at work from one round to the next.
"""
