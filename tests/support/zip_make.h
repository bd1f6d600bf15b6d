/*
 * zip_make.h: a zip archive of stored entries, laid down byte by byte, for tests of the .pt reader: it must not be held
 * to what the library that it reads with writes.
 */
#ifndef ESMM_TESTS_ZIP_MAKE_H
#define ESMM_TESTS_ZIP_MAKE_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { ZIP_MOST_ENTRIES = 16 };

typedef struct zip_entry {
  const char *name;
  const void *data;
  size_t size;
} zip_entry;

static inline void zip_put(unsigned char **at, uint32_t value, int bytes)
{
  for (int i = 0; i < bytes; i++)
    *(*at)++ = (unsigned char)(value >> (8 * i));
}

static inline uint32_t zip_crc(const void *data, size_t size)
{
  const unsigned char *bytes = data;
  uint32_t crc = 0xffffffffu;
  for (size_t i = 0; i < size; i++) {
    crc ^= bytes[i];
    for (int bit = 0; bit < 8; bit++)
      crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
  }
  return ~crc;
}

/* What the local and the central header have in common: version, flags, method, time, date, checksum, sizes, name. */
static inline void zip_put_header(unsigned char **at, const zip_entry *entry)
{
  zip_put(at, 20, 2);
  zip_put(at, 0, 2);
  zip_put(at, 0, 2);
  zip_put(at, 0, 2);
  zip_put(at, 0x21, 2);
  zip_put(at, zip_crc(entry->data, entry->size), 4);
  zip_put(at, (uint32_t)entry->size, 4);
  zip_put(at, (uint32_t)entry->size, 4);
  zip_put(at, (uint32_t)strlen(entry->name), 2);
  zip_put(at, 0, 2);
}

/* An archive in memory to free(); NULL: no memory. */
static inline unsigned char *zip_make(const zip_entry *entries, int count, size_t *size)
{
  uint32_t place[ZIP_MOST_ENTRIES];
  *size = 0;
  size_t room = 22;
  for (int i = 0; i < count; i++)
    room += 30 + 46 + 2 * strlen(entries[i].name) + entries[i].size;
  unsigned char *bytes = malloc(room), *at = bytes;
  if (!bytes)
    return NULL;
  for (int i = 0; i < count; i++) {
    const size_t name = strlen(entries[i].name);
    place[i] = (uint32_t)(at - bytes);
    zip_put(&at, 0x04034b50u, 4);
    zip_put_header(&at, &entries[i]);
    memcpy(at, entries[i].name, name);
    at += name;
    if (entries[i].size > 0)
      memcpy(at, entries[i].data, entries[i].size);
    at += entries[i].size;
  }
  const uint32_t directory = (uint32_t)(at - bytes);
  for (int i = 0; i < count; i++) {
    const size_t name = strlen(entries[i].name);
    zip_put(&at, 0x02014b50u, 4);
    zip_put(&at, 20, 2);
    zip_put_header(&at, &entries[i]);
    zip_put(&at, 0, 2);
    zip_put(&at, 0, 2);
    zip_put(&at, 0, 2);
    zip_put(&at, 0, 4);
    zip_put(&at, place[i], 4);
    memcpy(at, entries[i].name, name);
    at += name;
  }
  const uint32_t directory_bytes = (uint32_t)(at - bytes) - directory;
  zip_put(&at, 0x06054b50u, 4);
  zip_put(&at, 0, 2);
  zip_put(&at, 0, 2);
  zip_put(&at, (uint32_t)count, 2);
  zip_put(&at, (uint32_t)count, 2);
  zip_put(&at, directory_bytes, 4);
  zip_put(&at, directory, 4);
  zip_put(&at, 0, 2);
  *size = (size_t)(at - bytes);
  return bytes;
}

#endif
