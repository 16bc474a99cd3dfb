# Everything a developer runs; CI runs `make test`. Each target does the set-up that it needs.
.DEFAULT_GOAL := help

PYTHON ?= python3
BIN := $(CURDIR)/.venv/bin
NINJA := NINJA=$(BIN)/ninja $(BIN)/ninja
MESON := NINJA=$(BIN)/ninja $(BIN)/meson
SETUP := .venv/setup-done

SUDO := $(if $(filter-out 0,$(shell id -u)),sudo)
PACKAGES := gcc git pkg-config libc6-dev libssl-dev libsqlite3-dev libfuse3-dev fuse3 python3-dev \
  python3-venv util-linux
# Programs that the tests run on a mount.
PACKAGES += acl attr fio groff-base postgresql procps rocksdb-tools rsync sqlite3 strace systemd
# Sealing with intel-ipsec-mb is an option of x86-64; without it OpenSSL seals.
ifeq ($(shell uname -m),x86_64)
PACKAGES += libipsec-mb-dev
endif

# Ninja takes no lock, and people and tests may share a checkout: one make at a time in a folder.
# $(call locked,FOLDER,TARGET)
locked = @flock $(1).lock $(MAKE) --no-print-directory $(2)

# Each time anew, because Meson looks only then which files exist.
# $(call configured,FOLDER,OPTIONS)
configured = @$(MESON) setup --reconfigure $(1) -Dwerror=true $(2) >$(1).log || \
  { cat $(1).log; exit 1; }

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: $(SETUP) ## Install system packages and make .venv with all that tests and tools need

$(SETUP): pyproject.toml Makefile
	$(call locked,build,install)

# The package itself comes from the checkout, not from site-packages, so that an edited Python file
# counts at once. Pip installs it first all the same: for its dependencies, for its command, and as
# proof that what pip builds can be imported.
.PHONY: install
install:
	@test "$$(dpkg-query -W -f '$${db:Status-Status}\n' $(PACKAGES) 2>/dev/null | \
	  grep -cx installed)" = $(words $(PACKAGES)) || { \
	  $(SUDO) apt-get update -q && \
	  $(SUDO) env DEBIAN_FRONTEND=noninteractive \
	    apt-get install -y -q --no-install-recommends $(PACKAGES); }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "encfsd needs Python 3.11 or newer: make PYTHON=..."; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q '.[build,test]'
	cd / && $(BIN)/python -c 'import encfsd.native'
	@site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))') && \
	  rm -r "$$site/encfsd" && echo '$(CURDIR)' >"$$site/encfsd-checkout.pth"
	@touch $(SETUP)

.PHONY: build
build: $(SETUP) ## Compile the extension and put it beside its Python files
	$(call locked,build,in-place)

# Renamed into place, so that a process that has the old one mapped keeps it.
.PHONY: in-place
in-place:
	$(call configured,build)
	@$(NINJA) -C build --quiet
	@cmp -s build/encfsd/_native.abi3.so encfsd/_native.abi3.so || \
	  { cp build/encfsd/_native.abi3.so encfsd/_native.new.so && \
	    mv encfsd/_native.new.so encfsd/_native.abi3.so; }

.PHONY: check
check: build ## Lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy encfsd tests

.PHONY: test
test: check asan ## All but the long tests: lint, types, C tests under sanitizers, pytest with and without the fast path
	$(BIN)/python -m pytest -m 'not long'
	$(BIN)/python -m pytest -m 'not long' --no-fast-path tests/mount/test_conformance.py \
	  $(wildcard tests/mount/test_semantics_*.py)

.PHONY: test-long
test-long: build ## The tests that take minutes each, in about 40 minutes
	$(BIN)/python -m pytest -m long --timeout=1800
	$(BIN)/python -m pytest -m 'not long' --no-fast-path tests/mount
	ENCFSD_EXPLORE=long $(MESON) test -C build --timeout-multiplier=20 --print-errorlogs \
	  explorer object_faults volume_explorer volume_faults

.PHONY: asan
asan: $(SETUP) ## C unit tests under AddressSanitizer and UndefinedBehaviorSanitizer
	$(call locked,build-asan,native-tests FOLDER=build-asan SANITIZE=address,undefined)

.PHONY: tsan
tsan: $(SETUP) ## C unit tests under ThreadSanitizer
	$(call locked,build-tsan,native-tests FOLDER=build-tsan SANITIZE=thread)

.PHONY: native-tests
native-tests:
	$(call configured,$(FOLDER),-Doptimization=1 -Db_sanitize=$(SANITIZE))
	$(MESON) test -C $(FOLDER) --print-errorlogs $(TESTS)

.PHONY: bench
bench: build ## Measure mounts beside the raw directory, a C passthrough and installed peers (25 minutes)
	$(call locked,build-bench,bench-drivers)
	$(BIN)/python bench/mount.py $(BENCH)

.PHONY: bench-core
bench-core: build ## Measure the core and the namespace beside their limits
	$(call locked,build-bench,bench-drivers)
	$(BIN)/python bench/core.py $(BENCH)

.PHONY: bench-pool
bench-pool: build ## Measure the strategies of the node pool: take and give, RocksDB, CPU time
	$(call locked,build-bench,bench-drivers)
	$(BIN)/python bench/pool.py
	$(BIN)/python bench/rocksdb_compaction.py $(BENCH)

# As a wheel is built, which is what users run.
.PHONY: bench-drivers
bench-drivers:
	$(call configured,build-bench,-Dbuildtype=release)
	@$(NINJA) -C build-bench --quiet $(addprefix bench/,$(basename $(notdir $(wildcard bench/bench_*.c))))

.PHONY: demo
demo: build ## Run RocksDB on a fresh encrypted volume and look at it from outside
	$(BIN)/python bench/demo.py

.PHONY: clean
clean: ## Remove what was built, not the environment
	rm -rf build build-asan build-tsan build-bench encfsd/_native.abi3.so
