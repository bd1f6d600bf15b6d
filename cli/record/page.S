/* page.S: page.html in the command itself; cmd_report.c knows it by these names. */
  .section .rodata
  .globl esmm_page
  .globl esmm_page_end
esmm_page:
  .incbin "cli/record/page.html"
esmm_page_end:
  .byte 0
  .section .note.GNU-stack, "", %progbits
