"""Start-up before a process group exists: the process, its cores, builds of DeepSpeed's ops, the rendezvous."""
