# bench.mk: the benchmark of record, and the README's results made from it. Included at the end of the Makefile.
#
#   make bench-record [THREADS=2]   measures on this machine, on an idle one, and writes bench/results/<cpu>/cpu.jsonl
#   make readme-table               rewrites the README's results from the newest record

.PHONY: bench-record readme-table
bench-record:
	@sh scripts/setup.sh run
	@$(MAKE) --no-print-directory all
	@ESMM='$(BUILD)/esmm' $(if $(THREADS),THREADS='$(THREADS)') sh bench/record.sh

readme-table:
	@sh bench/readme_table.sh
