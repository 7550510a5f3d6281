/* Layers that are read from a file in every forward, because they do not all fit into memory.
 *
 * The file has each layer's panels as they lie in memory. Layer number n goes to buffer n % 2, so what points at its panels
 * never changes. A thread for each buffer reads the next layer that belongs there as soon as a forward has left the one
 * before: one is read while the other is computed, and the first ones of the next forward while this one ends. A late
 * thread of the pool may still read a buffer that is being filled: what it makes of that is never committed (pool.h).
 */
#ifndef PARLAY_STREAM_H
#define PARLAY_STREAM_H

#include <pthread.h>
#include <stdint.h>

typedef struct Stream Stream;

#define STREAM_BLOCK 4096 /* offsets, sizes and buffers are multiples of it, as direct reads want them */

/* Why a layer is not there; above 0: the system's number of what went wrong. */
enum { STREAM_ENDED = -1, STREAM_DAMAGED = -2, STREAM_STALLED = -3 };

typedef struct {
    int64_t offset, bytes;
    uint64_t sum; /* see parlay_stream_sum */
} StreamedLayer;

typedef struct {
    int64_t file, direct; /* a descriptor; 0: the system caches what is read, and is told to forget it */
    int64_t count, patience; /* layers; nanoseconds that a forward waits for one */
    const StreamedLayer *layer;
    char *buffer[2];
} Streaming;

/* A number that tells bytes from others; `count` is a multiple of STREAM_BLOCK. Any one word that differs changes it. */
uint64_t parlay_stream_sum(const char *bytes, int64_t count);

/* Reads one layer on the caller's thread. 0, or why it is not there. */
int64_t parlay_stream_read(const Streaming *from, int64_t number, char *to);

/* The same, and `began`, where it is not null, is when each piece was asked for, by the clock of `parlay_stream_now`. */
int64_t parlay_stream_watched(const Streaming *from, int64_t number, char *to, int64_t *began);

/* What readers of files share: nanoseconds, waiting for a change until `end` with the lock held (0: it is past), and a
 * thread of their own, which no signal reaches (0: there is none). */
int64_t parlay_stream_now(void);
int parlay_stream_wait(pthread_cond_t *bell, pthread_mutex_t *lock, int64_t end);
int parlay_stream_thread(void *(*serve)(void *), void *own);

/* Null where there is no memory or no thread for it. What `from` points at, but for the layers, must live until it is
 * closed. */
Stream *parlay_stream_open(const Streaming *from);

/* 1: the threads have ended. 0: the disk holds one of them for longer than the patience, and both buffers must stay. */
int64_t parlay_stream_close(Stream *stream);

/* A forward begins: what went wrong in the last one is forgotten. */
void parlay_stream_begin(Stream *stream);

/* It comes to a layer, `number` or none of these (-1): the one before may be overwritten. Returns when this one is there
 * or can't be had. One thread calls it for all. */
void parlay_stream_enter(Stream *stream, int64_t number);

/* Whether one of the first `entered` layers of the forward can't be had: so all threads of the pool leave it at the same
 * place, however late one of them looks. */
int parlay_stream_ends(const Stream *stream, int64_t entered);

/* Why the last forward had to end early; 0: it did not. */
int64_t parlay_stream_fault(const Stream *stream);

#endif
