"""Start-up before a process group exists: the process and the rendezvous."""
