/*
 * pickle.c: a stack machine that reads torch.save's pickles and executes nothing.
 *
 * Protocols 2 (torch.save's default) to 5. Values are made once and shared by pointers, as the pickle's memo shares
 * them: no opcode makes more than one value or looks at more of them than it has pushed, so that the work is linear in
 * the pickle's length. Values can refer to one another in circles: a function that walks them must expect that.
 */
#include "pickle.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#define MOST_VALUES ((size_t)1 << 22) /* a model of a hundred thousand tensors has a tenth of that */

/* ---- the names that a file of tensors uses ---- */

typedef enum role {
  MAKE_DICT,      /* collections.OrderedDict */
  MAKE_TENSOR,    /* torch._utils._rebuild_tensor_v2 */
  MAKE_TENSOR_V3, /* the same with its own dtype */
  MAKE_PARAMETER, /* torch._utils._rebuild_parameter: a tensor that is trained */
  MAKE_SIZE,      /* torch.Size: a tuple */
  STORAGE_TYPE,
  DTYPE
} role;

static const struct {
  const char *module, *name;
  role role;
  io_dtype dtype;
} globals[] = {
    {"collections", "OrderedDict", MAKE_DICT, IO_DTYPES},
    {"torch._utils", "_rebuild_tensor_v2", MAKE_TENSOR, IO_DTYPES},
    {"torch._utils", "_rebuild_tensor_v3", MAKE_TENSOR_V3, IO_DTYPES},
    {"torch._utils", "_rebuild_parameter", MAKE_PARAMETER, IO_DTYPES},
    {"torch", "Size", MAKE_SIZE, IO_DTYPES},
    {"torch", "FloatStorage", STORAGE_TYPE, IO_F32},
    {"torch", "HalfStorage", STORAGE_TYPE, IO_F16},
    {"torch", "BFloat16Storage", STORAGE_TYPE, IO_BF16},
    {"torch", "DoubleStorage", STORAGE_TYPE, IO_F64},
    {"torch", "LongStorage", STORAGE_TYPE, IO_I64},
    {"torch", "IntStorage", STORAGE_TYPE, IO_I32},
    {"torch", "ShortStorage", STORAGE_TYPE, IO_I16},
    {"torch", "CharStorage", STORAGE_TYPE, IO_I8},
    {"torch", "ByteStorage", STORAGE_TYPE, IO_U8},
    {"torch", "BoolStorage", STORAGE_TYPE, IO_BOOL},
    {"torch", "ComplexFloatStorage", STORAGE_TYPE, IO_C64},
    {"torch", "ComplexDoubleStorage", STORAGE_TYPE, IO_C128},
    {"torch.storage", "UntypedStorage", STORAGE_TYPE, IO_DTYPES},
    {"torch", "float32", DTYPE, IO_F32},
    {"torch", "float16", DTYPE, IO_F16},
    {"torch", "bfloat16", DTYPE, IO_BF16},
    {"torch", "float64", DTYPE, IO_F64},
    {"torch", "float8_e4m3fn", DTYPE, IO_F8_E4M3},
    {"torch", "float8_e5m2", DTYPE, IO_F8_E5M2},
    {"torch", "float8_e8m0fnu", DTYPE, IO_F8_E8M0},
    {"torch", "int64", DTYPE, IO_I64},
    {"torch", "int32", DTYPE, IO_I32},
    {"torch", "int16", DTYPE, IO_I16},
    {"torch", "int8", DTYPE, IO_I8},
    {"torch", "uint64", DTYPE, IO_U64},
    {"torch", "uint32", DTYPE, IO_U32},
    {"torch", "uint16", DTYPE, IO_U16},
    {"torch", "uint8", DTYPE, IO_U8},
    {"torch", "bool", DTYPE, IO_BOOL},
    {"torch", "complex64", DTYPE, IO_C64},
    {"torch", "complex128", DTYPE, IO_C128},
};
enum { GLOBALS = sizeof globals / sizeof *globals };

/* Names of the opcodes that are refused, for the error text. */
static const struct {
  unsigned char code;
  const char *name;
} refused[] = {
    {'0', "POP"},
    {'1', "POP_MARK"},
    {'2', "DUP"},
    {'F', "FLOAT"},
    {'I', "INT"},
    {'L', "LONG"},
    {'P', "PERSID"},
    {'S', "STRING"},
    {'T', "BINSTRING"},
    {'U', "SHORT_BINSTRING"},
    {'V', "UNICODE"},
    {'B', "BINBYTES"},
    {'C', "SHORT_BINBYTES"},
    {'d', "DICT"},
    {'g', "GET"},
    {'i', "INST"},
    {'l', "LIST"},
    {'o', "OBJ"},
    {'p', "PUT"},
    {0x81, "NEWOBJ"},
    {0x82, "EXT1"},
    {0x83, "EXT2"},
    {0x84, "EXT4"},
    {0x8b, "LONG4"},
    {0x8d, "BINUNICODE8"},
    {0x8e, "BINBYTES8"},
    {0x8f, "EMPTY_SET"},
    {0x90, "ADDITEMS"},
    {0x91, "FROZENSET"},
    {0x92, "NEWOBJ_EX"},
    {0x96, "BYTEARRAY8"},
    {0x97, "NEXT_BUFFER"},
    {0x98, "READONLY_BUFFER"},
};

static const char *refused_name(unsigned char code)
{
  for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
    if (refused[i].code == code)
      return refused[i].name;
  return "no opcode at all";
}

/* ---- the machine ---- */

/* Values are made in blocks that never move, and freed all at once. */
enum { BLOCK = 512 };

typedef struct block {
  struct block *next;
  size_t used;
  pickle_value values[BLOCK];
} block;

struct pickle {
  block *blocks;
  size_t values;
};

typedef struct machine {
  const unsigned char *start, *at, *end;
  size_t op_at; /* of the opcode that is being executed */
  pickle *made;
  pickle_items stack, memo;
  size_t *marks; /* heights of the stack */
  size_t mark_count, mark_room;
  const io_error *error;
} machine;

__attribute__((format(printf, 2, 3))) static int fail_at(const machine *m, const char *format, ...)
{
  char text[256];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  return io_fail(m->error, "its pickle, at byte %zu: %s", m->op_at, text);
}

static int no_memory(const machine *m)
{
  return fail_at(m, "no memory");
}

static int append(const machine *m, pickle_items *list, pickle_value *value)
{
  if (list->count == list->room) {
    const size_t room = list->room ? 2 * list->room : 4;
    pickle_value **moved = realloc(list->items, room * sizeof *moved);
    if (!moved)
      return no_memory(m);
    list->items = moved;
    list->room = room;
  }
  list->items[list->count++] = value;
  return 0;
}

static pickle_value *make(const machine *m, pickle_kind kind)
{
  pickle *p = m->made;
  if (p->values >= MOST_VALUES) {
    (void)fail_at(m, "more than %zu values", MOST_VALUES);
    return NULL;
  }
  if (!p->blocks || p->blocks->used == BLOCK) {
    block *more = calloc(1, sizeof *more);
    if (!more) {
      (void)no_memory(m);
      return NULL;
    }
    more->next = p->blocks;
    p->blocks = more;
  }
  pickle_value *value = &p->blocks->values[p->blocks->used++];
  value->kind = kind;
  p->values++;
  return value;
}

static int push(machine *m, pickle_value *value)
{
  return value ? append(m, &m->stack, value) : -1;
}

static size_t floor_of(const machine *m) /* what lies below the last mark is not to be touched */
{
  return m->mark_count ? m->marks[m->mark_count - 1] : 0;
}

static pickle_value *pop(machine *m)
{
  if (m->stack.count > floor_of(m))
    return m->stack.items[--m->stack.count];
  (void)fail_at(m, "there is nothing on the stack");
  return NULL;
}

static pickle_value *top(machine *m)
{
  pickle_value *value = pop(m);
  m->stack.count += value != NULL;
  return value;
}

static int push_mark(machine *m, size_t unused)
{
  (void)unused;
  if (m->mark_count == m->mark_room) {
    const size_t room = m->mark_room ? 2 * m->mark_room : 16;
    size_t *moved = realloc(m->marks, room * sizeof *moved);
    if (!moved)
      return no_memory(m);
    m->marks = moved;
    m->mark_room = room;
  }
  m->marks[m->mark_count++] = m->stack.count;
  return 0;
}

/* How many values were pushed since the last mark, which is taken away. */
static int pop_mark(machine *m, size_t *count)
{
  *count = 0;
  if (m->mark_count == 0)
    return fail_at(m, "there is no mark");
  *count = m->stack.count - m->marks[--m->mark_count];
  return 0;
}

static bool take_bytes(machine *m, size_t count, const unsigned char **bytes)
{
  if (count > (size_t)(m->end - m->at)) {
    (void)fail_at(m, "it ends in the middle of an opcode");
    return false;
  }
  *bytes = m->at;
  m->at += count;
  return true;
}

static bool take_unsigned(machine *m, size_t count, uint64_t *out)
{
  const unsigned char *bytes;
  if (!take_bytes(m, count, &bytes))
    return false;
  *out = 0;
  for (size_t i = count; i > 0; i--)
    *out = *out << 8 | bytes[i - 1];
  return true;
}

/* ---- values ---- */

static int push_empty(machine *m, size_t kind)
{
  return push(m, make(m, (pickle_kind)kind));
}

static int push_integer(machine *m, pickle_kind kind, int64_t integer)
{
  pickle_value *value = make(m, kind);
  if (value)
    value->as.integer = integer;
  return push(m, value);
}

/* Little-endian two's complement of `count` bytes. */
static int push_long(machine *m, size_t count)
{
  uint64_t bits;
  if (count > sizeof bits)
    return fail_at(m, "a number of %zu bytes is too large", count);
  if (!take_unsigned(m, count, &bits))
    return -1;
  if (count > 0 && count < sizeof bits && bits >> (8 * count - 1))
    bits |= UINT64_MAX << (8 * count);
  return push_integer(m, PICKLE_INT, (int64_t)bits);
}

static int push_long1(machine *m, size_t unused)
{
  uint64_t count;
  (void)unused;
  return take_unsigned(m, 1, &count) ? push_long(m, (size_t)count) : -1;
}

static int push_unsigned(machine *m, size_t bytes)
{
  uint64_t number;
  return take_unsigned(m, bytes, &number) ? push_integer(m, PICKLE_INT, (int64_t)number) : -1;
}

static int push_bool(machine *m, size_t value)
{
  return push_integer(m, PICKLE_BOOL, (int64_t)value);
}

static int push_float(machine *m, size_t unused)
{
  const unsigned char *bytes;
  (void)unused;
  if (!take_bytes(m, sizeof(double), &bytes))
    return -1;
  uint64_t bits = 0;
  for (size_t i = 0; i < sizeof bits; i++)
    bits = bits << 8 | bytes[i];
  pickle_value *value = make(m, PICKLE_FLOAT);
  if (value)
    memcpy(&value->as.number, &bits, sizeof bits);
  return push(m, value);
}

static int push_string(machine *m, size_t length_bytes)
{
  uint64_t length;
  const unsigned char *bytes;
  if (!take_unsigned(m, length_bytes, &length) || !take_bytes(m, length, &bytes))
    return -1;
  pickle_value *value = make(m, PICKLE_STRING);
  if (value) {
    value->as.string.text = (const char *)bytes;
    value->as.string.length = length;
  }
  return push(m, value);
}

/* A tuple of the last `count` values. */
static int push_tuple(machine *m, size_t count)
{
  pickle_value *tuple = make(m, PICKLE_TUPLE);
  if (!tuple)
    return -1;
  if (m->stack.count - floor_of(m) < count)
    return fail_at(m, "a tuple of %zu, and less is on the stack", count);
  for (size_t i = m->stack.count - count; i < m->stack.count; i++)
    if (append(m, &tuple->as.list, m->stack.items[i]) != 0)
      return -1;
  m->stack.count -= count;
  return push(m, tuple);
}

static int push_marked_tuple(machine *m, size_t unused)
{
  size_t count;
  (void)unused;
  return pop_mark(m, &count) == 0 ? push_tuple(m, count) : -1;
}

/* Moves the last `count` values into the list or dictionary below them. */
static int extend(machine *m, pickle_kind kind, size_t count)
{
  if (m->stack.count - floor_of(m) < count)
    return fail_at(m, "there is nothing on the stack");
  m->stack.count -= count;
  pickle_value *target = top(m);
  if (!target)
    return -1;
  pickle_value *const *items = m->stack.items + m->stack.count;
  if (target->kind != kind)
    return fail_at(m, "items for something that is no %s", kind == PICKLE_LIST ? "list" : "dictionary");
  if (kind == PICKLE_DICT && count % 2)
    return fail_at(m, "a key without a value");
  for (size_t i = 0; i < count; i++)
    if (append(m, &target->as.list, items[i]) != 0)
      return -1;
  return 0;
}

static int extend_list(machine *m, size_t count)
{
  return extend(m, PICKLE_LIST, count);
}

static int extend_dict(machine *m, size_t count)
{
  return extend(m, PICKLE_DICT, count);
}

static int extend_by_marked(machine *m, size_t kind)
{
  size_t count;
  return pop_mark(m, &count) == 0 ? extend(m, (pickle_kind)kind, count) : -1;
}

/* ---- the memo ---- */

/* Picklers count from 0 up, so a number that skips others is refused. number_bytes 0: the next one. */
static int put(machine *m, size_t number_bytes)
{
  uint64_t number = m->memo.count;
  pickle_value *value = top(m);
  if (!value || (number_bytes > 0 && !take_unsigned(m, number_bytes, &number)))
    return -1;
  if (number > m->memo.count)
    return fail_at(m, "memo number %llu after %zu", (unsigned long long)number, m->memo.count);
  if (number == m->memo.count)
    return append(m, &m->memo, value);
  m->memo.items[number] = value;
  return 0;
}

static int get(machine *m, size_t number_bytes)
{
  uint64_t number;
  if (!take_unsigned(m, number_bytes, &number))
    return -1;
  return number < m->memo.count ? push(m, m->memo.items[number])
                                : fail_at(m, "memo number %llu is not there", (unsigned long long)number);
}

/* ---- names, and what they make ---- */

static bool is_printable(const char *text, size_t length)
{
  for (size_t i = 0; i < length; i++)
    if (text[i] < 0x20 || text[i] > 0x7e)
      return false;
  return true;
}

static int push_global(machine *m, const char *module, size_t module_length, const char *name, size_t name_length)
{
  for (int i = 0; i < GLOBALS; i++)
    if (strlen(globals[i].module) == module_length && memcmp(globals[i].module, module, module_length) == 0 &&
        strlen(globals[i].name) == name_length && memcmp(globals[i].name, name, name_length) == 0) {
      pickle_value *value = make(m, PICKLE_GLOBAL);
      if (value)
        value->as.global = i;
      return push(m, value);
    }
  if (module_length > 80 || name_length > 80 || !is_printable(module, module_length) ||
      !is_printable(name, name_length))
    return fail_at(m, "it uses a name that is no plain Python name: refused");
  return fail_at(m, "it uses %.*s.%.*s, which is nothing that tensors need: refused", (int)module_length, module,
                 (int)name_length, name);
}

/* Two lines of text. */
static int read_global(machine *m, size_t unused)
{
  (void)unused;
  const char *line[2];
  size_t length[2];
  for (int i = 0; i < 2; i++) {
    const unsigned char *end = memchr(m->at, '\n', (size_t)(m->end - m->at));
    if (!end)
      return fail_at(m, "it ends in the middle of a name");
    line[i] = (const char *)m->at;
    length[i] = (size_t)(end - m->at);
    m->at = end + 1;
  }
  return push_global(m, line[0], length[0], line[1], length[1]);
}

static int stack_global(machine *m, size_t unused)
{
  (void)unused;
  const pickle_value *name = pop(m), *module = name ? pop(m) : NULL;
  if (!module)
    return -1;
  if (module->kind != PICKLE_STRING || name->kind != PICKLE_STRING)
    return fail_at(m, "the name of a global is no string");
  return push_global(m, module->as.string.text, module->as.string.length, name->as.string.text, name->as.string.length);
}

static bool has_role(const pickle_value *value, role wanted)
{
  return value->kind == PICKLE_GLOBAL && globals[value->as.global].role == wanted;
}

static bool is_string(const pickle_value *value, const char *text)
{
  return value->kind == PICKLE_STRING && value->as.string.length == strlen(text) &&
         memcmp(value->as.string.text, text, value->as.string.length) == 0;
}

/* ("storage", type, key, place, elements) */
static int push_storage(machine *m, size_t unused)
{
  (void)unused;
  const pickle_value *id = pop(m);
  if (!id)
    return -1;
  pickle_value *const *part = id->as.list.items;
  if (id->kind != PICKLE_TUPLE || id->as.list.count != 5 || !is_string(part[0], "storage") ||
      !has_role(part[1], STORAGE_TYPE) || part[2]->kind != PICKLE_STRING || part[3]->kind != PICKLE_STRING ||
      part[4]->kind != PICKLE_INT || part[4]->as.integer < 0)
    return fail_at(m, "a persistent id that is not that of a storage");
  pickle_value *value = make(m, PICKLE_STORAGE);
  if (value)
    value->as.storage = (pickle_storage){globals[part[1]->as.global].dtype, part[2], part[4]->as.integer};
  return push(m, value);
}

/* Do all elements that shape and stride reach lie in the storage? */
static int check_reach(const machine *m, const pickle_tensor *t)
{
  int64_t last = t->offset, elements = t->storage->elements, step;
  bool empty = false, overflow = false;
  if (t->storage->dtype == IO_DTYPES) /* counted in bytes */
    elements = elements / ((int64_t)io_dtype_bits(t->dtype) / 8);
  for (int i = 0; i < t->dims; i++)
    empty = empty || t->shape[i] == 0;
  for (int i = 0; i < t->dims && !empty; i++)
    overflow = overflow || __builtin_mul_overflow(t->shape[i] - 1, t->stride[i], &step) ||
               __builtin_add_overflow(last, step, &last);
  if (overflow || last > elements - (empty ? 0 : 1))
    return fail_at(m, "a tensor reaches beyond the %lld elements of its storage", (long long)elements);
  return 0;
}

static int take_extents(const machine *m, const pickle_value *tuple, int64_t *out, int *count)
{
  if (tuple->kind != PICKLE_TUPLE)
    return fail_at(m, "a shape or stride that is no tuple");
  if (tuple->as.list.count > IO_TENSOR_DIMS)
    return fail_at(m, "a tensor of %zu dimensions, and at most %d are read", tuple->as.list.count, IO_TENSOR_DIMS);
  *count = (int)tuple->as.list.count;
  for (int i = 0; i < *count; i++) {
    const pickle_value *extent = tuple->as.list.items[i];
    if (extent->kind != PICKLE_INT || extent->as.integer < 0)
      return fail_at(m, "a shape or stride that is no whole number from 0 up");
    out[i] = extent->as.integer;
  }
  return 0;
}

/* (storage, offset, shape, stride, requires_grad, hooks[, dtype in v3][, metadata]) */
static int push_tensor(machine *m, const pickle_items *args, bool with_dtype)
{
  const size_t least = with_dtype ? 7 : 6;
  if (args->count < least || args->count > least + 1 || args->items[0]->kind != PICKLE_STORAGE ||
      args->items[1]->kind != PICKLE_INT || args->items[1]->as.integer < 0)
    return fail_at(m, "a tensor whose parts are not those of a tensor");
  pickle_tensor *t = calloc(1, sizeof *t);
  pickle_value *value = t ? make(m, PICKLE_TENSOR) : NULL;
  if (!value) {
    free(t);
    return t ? -1 : no_memory(m);
  }
  value->as.tensor = t; /* freed with the pickle */
  t->storage = &args->items[0]->as.storage;
  t->dtype =
      with_dtype && has_role(args->items[6], DTYPE) ? globals[args->items[6]->as.global].dtype : t->storage->dtype;
  t->offset = args->items[1]->as.integer;
  int strides = 0;
  if (t->dtype == IO_DTYPES || (t->storage->dtype != IO_DTYPES && t->storage->dtype != t->dtype))
    return fail_at(m, "a tensor whose dtype is not that of its storage");
  if (take_extents(m, args->items[2], t->shape, &t->dims) != 0 ||
      take_extents(m, args->items[3], t->stride, &strides) != 0)
    return -1;
  if (strides != t->dims)
    return fail_at(m, "a tensor of %d dimensions with %d strides", t->dims, strides);
  return check_reach(m, t) == 0 ? push(m, value) : -1;
}

/* The only calls there are; none runs anything. */
static int reduce(machine *m, size_t unused)
{
  (void)unused;
  const pickle_value *args = pop(m), *callee = args ? pop(m) : NULL;
  if (!callee)
    return -1;
  if (callee->kind != PICKLE_GLOBAL || args->kind != PICKLE_TUPLE)
    return fail_at(m, "a call of something that cannot be called");
  const pickle_items *list = &args->as.list;
  switch (globals[callee->as.global].role) {
  case MAKE_DICT:
    if (list->count == 0)
      return push(m, make(m, PICKLE_DICT));
    break;
  case MAKE_TENSOR:
    return push_tensor(m, list, false);
  case MAKE_TENSOR_V3:
    return push_tensor(m, list, true);
  case MAKE_PARAMETER:
    if (list->count == 3 && list->items[0]->kind == PICKLE_TENSOR)
      return push(m, list->items[0]);
    break;
  case MAKE_SIZE:
    if (list->count == 1 && list->items[0]->kind == PICKLE_TUPLE)
      return push(m, list->items[0]);
    break;
  case STORAGE_TYPE:
  case DTYPE:
    break;
  }
  return fail_at(m, "a call of %s.%s with arguments that it does not take", globals[callee->as.global].module,
                 globals[callee->as.global].name);
}

/* A state dict's dictionary has attributes too (_metadata: versions of modules), which are not needed. */
static int build(machine *m, size_t unused)
{
  (void)unused;
  const pickle_value *state = pop(m), *object = state ? top(m) : NULL;
  if (!object)
    return -1;
  return object->kind == PICKLE_DICT && state->kind == PICKLE_DICT
             ? 0
             : fail_at(m, "attributes for something that is no dictionary");
}

/* ---- execution ---- */

static int read_protocol(machine *m, size_t unused)
{
  uint64_t version;
  (void)unused;
  if (!take_unsigned(m, 1, &version))
    return -1;
  return version >= 2 && version <= 5 ? 0 : fail_at(m, "protocol %d: 2 to 5 are read", (int)version);
}

static int read_frame(machine *m, size_t unused)
{
  uint64_t length;
  (void)unused;
  if (!take_unsigned(m, 8, &length))
    return -1;
  return length <= (uint64_t)(m->end - m->at) ? 0 : fail_at(m, "a frame that is longer than the pickle");
}

static const struct {
  unsigned char code;
  int (*run)(machine *, size_t);
  size_t argument;
} opcodes[] = {
    {0x80, read_protocol, 0},             /* PROTO */
    {0x95, read_frame, 0},                /* FRAME */
    {'(', push_mark, 0},                  /* MARK */
    {'N', push_empty, PICKLE_NONE},       /* NONE */
    {0x88, push_bool, 1},                 /* NEWTRUE */
    {0x89, push_bool, 0},                 /* NEWFALSE */
    {'J', push_long, 4},                  /* BININT */
    {'K', push_unsigned, 1},              /* BININT1 */
    {'M', push_unsigned, 2},              /* BININT2 */
    {0x8a, push_long1, 0},                /* LONG1 */
    {'G', push_float, 0},                 /* BINFLOAT */
    {'X', push_string, 4},                /* BINUNICODE */
    {0x8c, push_string, 1},               /* SHORT_BINUNICODE */
    {']', push_empty, PICKLE_LIST},       /* EMPTY_LIST */
    {'}', push_empty, PICKLE_DICT},       /* EMPTY_DICT */
    {')', push_tuple, 0},                 /* EMPTY_TUPLE */
    {0x85, push_tuple, 1},                /* TUPLE1 */
    {0x86, push_tuple, 2},                /* TUPLE2 */
    {0x87, push_tuple, 3},                /* TUPLE3 */
    {'t', push_marked_tuple, 0},          /* TUPLE */
    {'a', extend_list, 1},                /* APPEND */
    {'e', extend_by_marked, PICKLE_LIST}, /* APPENDS */
    {'s', extend_dict, 2},                /* SETITEM */
    {'u', extend_by_marked, PICKLE_DICT}, /* SETITEMS */
    {'q', put, 1},                        /* BINPUT */
    {'r', put, 4},                        /* LONG_BINPUT */
    {0x94, put, 0},                       /* MEMOIZE */
    {'h', get, 1},                        /* BINGET */
    {'j', get, 4},                        /* LONG_BINGET */
    {'c', read_global, 0},                /* GLOBAL */
    {0x93, stack_global, 0},              /* STACK_GLOBAL */
    {'Q', push_storage, 0},               /* BINPERSID */
    {'R', reduce, 0},                     /* REDUCE */
    {'b', build, 0},                      /* BUILD */
};

static int execute(machine *m, unsigned char code)
{
  for (size_t i = 0; i < sizeof opcodes / sizeof *opcodes; i++)
    if (opcodes[i].code == code)
      return opcodes[i].run(m, opcodes[i].argument);
  return fail_at(m, "opcode 0x%02x (%s) is nothing that tensors need: refused", code, refused_name(code));
}

static pickle_value *run(machine *m)
{
  while (m->at < m->end) {
    m->op_at = (size_t)(m->at - m->start);
    const unsigned char opcode = *m->at++;
    if (opcode == '.') /* STOP */
      return pop(m);
    if (execute(m, opcode) != 0)
      return NULL;
  }
  m->op_at = (size_t)(m->at - m->start);
  (void)fail_at(m, "it ends without a STOP: truncated?");
  return NULL;
}

int pickle_read(const unsigned char *bytes, size_t size, pickle **out, pickle_value **root, const io_error *error)
{
  machine m = {.start = bytes, .at = bytes, .end = bytes + size, .error = error};
  *root = NULL;
  *out = m.made = calloc(1, sizeof *m.made);
  if (!m.made)
    return no_memory(&m);
  *root = run(&m);
  free(m.stack.items);
  free(m.memo.items);
  free(m.marks);
  if (*root)
    return 0;
  pickle_free(*out);
  *out = NULL;
  return -1;
}

void pickle_free(pickle *p)
{
  if (!p)
    return;
  while (p->blocks) {
    block *b = p->blocks;
    p->blocks = b->next;
    for (size_t i = 0; i < b->used; i++) {
      const pickle_kind kind = b->values[i].kind;
      if (kind == PICKLE_TUPLE || kind == PICKLE_LIST || kind == PICKLE_DICT)
        free(b->values[i].as.list.items);
      else if (kind == PICKLE_TENSOR)
        free(b->values[i].as.tensor);
    }
    free(b);
  }
  free(p);
}
