# Comparisons with other servers; included by the Makefile of the project. See bench/README.md.

BENCH_BUILD := build/bench
BENCH_CFLAGS := -O2 -g -Wall -Wextra -Werror
BENCH_ENV := PYTHONPATH=src:tests

$(BENCH_BUILD):
	@mkdir -p $@

$(BENCH_BUILD)/fanout_uring $(BENCH_BUILD)/uring_options: $(BENCH_BUILD)/%: bench/%.c bench/load.c bench/load.h | $(BENCH_BUILD)
	$(CC) $(BENCH_CFLAGS) -o $@ $< bench/load.c -luring

$(BENCH_BUILD)/%: bench/%.c bench/load.c bench/load.h | $(BENCH_BUILD)
	$(CC) $(BENCH_CFLAGS) -o $@ $< bench/load.c

.PHONY: bench-programs
bench-programs: $(addprefix $(BENCH_BUILD)/,fanout_uring uring_options fanout_client sse_client fm_client)

BENCHES := frontend e2e wire fanout streams prompts idle scheduler neighbour survive uring isolation

# So short that a pass takes some minutes: it shows that all of them work, and its figures mean nothing.
QUICK_frontend := --streams 16 --rounds 1 --tokens 16
QUICK_e2e := --concurrency 4 --tenants 1 --rounds 1 --waves 1
QUICK_wire := --tokens 32 --prompts 2
QUICK_fanout := --connections 64 --rounds 1 --seconds 0.2
QUICK_streams := --streams 64 --seconds 8
QUICK_prompts := --streams 32 --prompts 2 --prompt-tokens 5000 --rounds 1
QUICK_idle := --connections 500 --rounds 1 --seconds 2 --hold-seconds 2
QUICK_scheduler := --seconds 5 --rounds 1 --streams 16 --round-seconds 3
QUICK_neighbour := --seconds 8 --outstanding 8
QUICK_survive := --rounds 1 --parts daemon --deaths worker
QUICK_uring := --rounds 1 --seconds 0.1
QUICK_isolation := --seconds 2 --pairs 1

.PHONY: bench
bench: ## All comparisons, one after the other, then docs/performance.md; some hours: QUICK=1 BENCHES="fanout wire"
	@for name in $(BENCHES); do $(MAKE) bench-$$name BENCH_ARGS=$(if $(QUICK),'$$(QUICK_'$$name')'); done
	@$(MAKE) bench-page

.PHONY: bench-page
bench-page: ## docs/performance.md from the results in build/bench
	@$(SETUP) base bench
	@$(BENCH_ENV) $(PY) -m bench.page

.PHONY: bench-fanout
bench-fanout: ## Messages/s beside a C bound and Python servers; last line JSON: BENCH_ARGS="--rounds 3"
	@$(SETUP) base bench
	@$(MAKE) bench-programs >&2
	@$(BENCH_ENV) $(PY) -m bench.fanout $(BENCH_ARGS)

.PHONY: bench-frontend
bench-frontend: ## CPU time per token beside vLLM's own servers; last line JSON: BENCH_ARGS="--rounds 3"
	@$(SETUP) base bench engine
	@$(MAKE) bench-programs >&2
	@$(BENCH_ENV) $(PY) -m bench.frontend $(BENCH_ARGS)

.PHONY: bench-e2e
bench-e2e: ## Throughput and latency beside vLLM's own servers; last line JSON: BENCH_ARGS="--rounds 3"
	@$(SETUP) base bench engine
	@$(BENCH_ENV) $(PY) -m bench.e2e $(BENCH_ARGS)

.PHONY: bench-wire
bench-wire: ## Bytes per token of each door; last line JSON: BENCH_ARGS="--tokens 512"
	@$(SETUP) base bench engine
	@$(BENCH_ENV) $(PY) -m bench.wire $(BENCH_ARGS)

.PHONY: bench-idle
bench-idle: ## 100,000 idle WebSockets; last line JSON: BENCH_ARGS="--connections 100000 --hold-seconds 600"
	@$(SETUP) base bench
	@$(MAKE) bench-programs >&2
	@$(BENCH_ENV) $(PY) -m bench.idle $(BENCH_ARGS)

.PHONY: bench-streams
bench-streams: ## 2,048 streams at 20 tokens/s: is the last byte there in time?; last line JSON: BENCH_ARGS="--seconds 60"
	@$(SETUP) base bench
	@$(MAKE) bench-programs >&2
	@$(BENCH_ENV) $(PY) -m bench.streams $(BENCH_ARGS)

.PHONY: bench-prompts
bench-prompts: ## Live streams beside prompts of 200,000 tokens; last line JSON: BENCH_ARGS="--rounds 3"
	@$(SETUP) base bench
	@$(MAKE) bench-programs >&2
	@$(BENCH_ENV) $(PY) -m bench.prompts $(BENCH_ARGS)

.PHONY: bench-uring
bench-uring: ## Options of io_uring, over loopback and virtual links; last line JSON: BENCH_ARGS="--rounds 5"
	@$(SETUP) base bench
	@$(MAKE) bench-programs >&2
	@$(BENCH_ENV) $(PY) -m bench.uring $(BENCH_ARGS)

.PHONY: bench-scheduler
bench-scheduler: ## Shares kept, and throughput beside vLLM's own scheduler; last line JSON: BENCH_ARGS="--seconds 60"
	@$(SETUP) base bench engine
	@$(BENCH_ENV) $(PY) -m bench.scheduler $(BENCH_ARGS)

.PHONY: bench-neighbour
bench-neighbour: ## A flood of long prompts beside short requests; last line JSON: BENCH_ARGS="--seconds 60"
	@$(SETUP) base bench engine
	@$(BENCH_ENV) $(PY) -m bench.neighbour $(BENCH_ARGS)

.PHONY: bench-survive
bench-survive: ## Deaths of everything under streams, nothing lost; last line JSON: BENCH_ARGS="--rounds 3 --parts daemon"
	@$(SETUP) base bench engine
	@$(BENCH_ENV) $(PY) -m bench.survive $(BENCH_ARGS)

SECONDS ?= 600

.PHONY: soak
soak: ## A mixed load under random deaths, every text checked; last line JSON: SECONDS=600 SOAK_ARGS="--seed 1"
	@$(SETUP) base bench
	@$(BENCH_ENV) $(PY) -m bench.soak --seconds $(SECONDS) $(SOAK_ARGS)

.PHONY: bench-isolation
bench-isolation: bpf ## How exactly the kernel's limits hold, in a guest; last line JSON: BENCH_ARGS="--seconds 20 --pairs 3"
	@$(SETUP) base bench dev vm
	@$(BENCH_ENV) $(PY) -m bench.isolation $(BENCH_ARGS)
