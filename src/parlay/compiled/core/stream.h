/* Layer streaming: a model that does not fit into memory keeps its layers in a file, and every forward reads them all, one
 * layer ahead of the computation. forward.h calls `begin`, `enter` and `ends`; Python opens and closes the stream.
 *
 * The file has each layer's panels as they lie in memory. Layer n goes to buffer n % 2, so pointers to its panels never
 * change. Each buffer has a thread, which reads the next layer of this buffer as soon as the forward has left the last one:
 *
 *     buffer 0    read 0 | compute 0 | read 2 ........ | compute 2 | ...
 *     buffer 1    read 1 ........... | compute 1       | read 3 ........
 *
 * While the last layers are computed, the first ones of the next forward are read. A late thread of the pool may still read a
 * buffer that is being filled: what it makes of that is never committed (pool.h).
 */
#ifndef PARLAY_STREAM_H
#define PARLAY_STREAM_H

#include <pthread.h>
#include <stdint.h>

typedef struct Stream Stream;

#define STREAM_BLOCK 4096 /* offsets, sizes and buffers are multiples of it, as direct reads (O_DIRECT) require */

/* Why a layer could not be read: the file ends early, its checksum
 * is wrong, or the disk does not answer. Above 0: an errno. */
enum { STREAM_ENDED = -1, STREAM_DAMAGED = -2, STREAM_STALLED = -3 };

/* Where the file has a layer. */
typedef struct {
    int64_t offset, bytes;
    uint64_t sum; /* checksum: parlay_stream_sum */
} StreamedLayer;

/* What a stream reads, and to where. */
typedef struct {
    /* file: a descriptor. direct: 1: reads bypass the system's cache; 0: what was read is dropped from it. */
    int64_t file, direct;
    int64_t count, patience; /* layers; how many nanoseconds a forward waits for a sign of life of the disk */
    const StreamedLayer *layer;
    char *buffer[2];
} Streaming;

/* A checksum of `count` bytes, a multiple of STREAM_BLOCK. If any one word differs, so does the checksum. */
uint64_t parlay_stream_sum(const char *bytes, int64_t count);

/* Reads one layer on the caller's thread. Returns 0, or why it could not be read. */
int64_t parlay_stream_read(const Streaming *from, int64_t number, char *to);

/* The same. `began`, if not null, gets the time at which each piece was asked of the disk, by parlay_stream_now. */
int64_t parlay_stream_watched(const Streaming *from, int64_t number, char *to, int64_t *began);

/* What stream.c and shelf.c share: the time in nanoseconds; waiting for a change until `end`, with the lock held (0: it
 * is past); starting a thread that no signal reaches (0: the system gives none). */
int64_t parlay_stream_now(void);
int parlay_stream_wait(pthread_cond_t *bell, pthread_mutex_t *lock, int64_t end);
int parlay_stream_thread(void *(*serve)(void *), void *own);

/* Starts the threads. Null: there is no memory or no thread. What `from` points at must live until the stream is
 * closed, but for its array of layers, which is copied. */
Stream *parlay_stream_open(const Streaming *from);

/* Ends the threads. 1: they have ended, and the stream is freed. 0: the disk has held one of them for longer than the
 * patience; then stream and buffers must stay. */
int64_t parlay_stream_close(Stream *stream);

/* Begins a forward, and forgets the last one's fault. */
void parlay_stream_begin(Stream *stream);

/* Called when a forward comes to layer `number`, or to a layer that is not streamed (-1). Frees the buffer of the
 * streamed layer before it, and waits until layer `number` is in memory, or can't be read. One thread calls it for all. */
void parlay_stream_enter(Stream *stream, int64_t number);

/* Whether one of the first `entered` layers of this forward could not be read. Each thread asks with its own count, so
 * all leave the forward at the same place, however late they are. */
int parlay_stream_ends(const Stream *stream, int64_t entered);

/* Why the last forward ended early; 0: it did not. */
int64_t parlay_stream_fault(const Stream *stream);

#endif
