// Package kjo makes and reads jobs, events and KDLQ messages of kjo_django, as franz-go sends and
// receives them. The rules are those of docs/reference/protocol.md; vectors/main.go checks them.
package kjo

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"regexp"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/twmb/franz-go/pkg/kgo"
)

// Refused is the error of a record that no retry can make readable.
type Refused struct {
	Reason  string // of its dead letter
	Message string
}

func (refused *Refused) Error() string { return refused.Reason + ": " + refused.Message }

// Connect returns a client of the brokers in KAFKA_BOOTSTRAP_SERVERS.
func Connect(options ...kgo.Opt) (*kgo.Client, error) {
	brokers := strings.Split(os.Getenv("KAFKA_BOOTSTRAP_SERVERS"), ",")
	return kgo.NewClient(append(options, kgo.SeedBrokers(brokers...))...)
}

// Consume returns a client that reads topics from their beginning and commits when it is told to.
func Consume(group string, topics ...string) (*kgo.Client, error) {
	start := kgo.ConsumeResetOffset(kgo.NewOffset().AtStart())
	return Connect(kgo.ConsumerGroup(group), kgo.ConsumeTopics(topics...), start, kgo.DisableAutoCommit())
}

// --- Jobs ----------------------------------------------------------------------------------------

// Job is what a worker is asked to run. ID identifies its effects: whoever sends it again, sends
// the same id, and it runs once.
type Job struct {
	ID, Type    string
	Arguments   any
	JobID       string
	Service     string
	Generation  int
	Attempt     int
	ReplayCount int
	ContentType string
}

// NewJob returns the message of a job for a worker; an empty key is none.
func NewJob(topic, key, id, kind string, arguments any) (*kgo.Record, error) {
	value, err := encode(arguments)
	if err != nil {
		return nil, err
	}
	headers := set(nil, "kjo-id", []byte(id))
	record := &kgo.Record{Topic: topic, Value: value, Headers: set(headers, "kjo-type", []byte(kind))}
	if key != "" {
		record.Key = []byte(key)
	}
	return record, nil
}

// ReadJob reads a job's message, its dead letter or its replay; a *Refused if it cannot be read.
func ReadJob(record *kgo.Record) (*Job, error) {
	if len(record.Value) == 0 {
		return nil, &Refused{"invalid", "The message has no value"}
	}
	job := &Job{
		JobID:       text(record, "kjo-job-id", ""),
		Service:     text(record, "kjo-service", ""),
		Generation:  number(record, "kjo-generation", 1),
		Attempt:     number(record, "kjo-attempt", 1),
		ReplayCount: number(record, "kjo-replay-count", 0),
		ContentType: text(record, "content-type", "application/json"),
	}
	if utf8.RuneCountInString(job.JobID) > 200 || strings.Contains(job.JobID, "\x00") {
		return nil, &Refused{"invalid", "The kjo-job-id header is not a usable identifier"}
	}
	var err error
	if job.ID, err = identifier(record, "kjo-id", 200); err != nil {
		return nil, err
	}
	if job.Type, err = identifier(record, "kjo-type", 100); err != nil {
		return nil, err
	}
	name, _, _ := strings.Cut(job.ContentType, ";")
	if strings.ToLower(strings.TrimSpace(name)) != "application/json" {
		return nil, &Refused{"deserialization", job.ContentType + " is not read here"}
	}
	job.Arguments, err = decode(record.Value)
	return job, err
}

// --- Events --------------------------------------------------------------------------------------

// Event is what a service tells others.
type Event struct {
	ID         string         `json:"id"`
	Type       string         `json:"type"`
	Source     string         `json:"source"`
	Timestamp  int64          `json:"timestamp"` // milliseconds of Unix time
	Version    string         `json:"version"`
	Data       map[string]any `json:"data"`
	Subject    string         `json:"subject,omitempty"`
	DataSchema string         `json:"dataschema,omitempty"`
	Metadata   map[string]any `json:"metadata,omitempty"`
}

// Key returns the key of the event's record: its user, else its id.
func (event *Event) Key() string {
	for _, given := range []any{event.Metadata["userId"], either(event.Data, "userId", "user_id")} {
		if user, isText := asText(given).(string); isText && user != "" {
			return user
		}
	}
	return event.ID
}

// NewEvent returns the message of an event, which has got an id, a timestamp and a version where it
// had none; a *Refused if it is not a valid one.
func NewEvent(topic string, event Event) (*kgo.Record, error) {
	given := map[string]any{
		"id": event.ID, "type": event.Type, "source": event.Source, "version": event.Version,
		"timestamp": json.Number(strconv.FormatInt(event.Timestamp, 10)), "data": event.Data,
	}
	if event.ID == "" {
		given["id"] = newID()
	}
	if event.Timestamp == 0 {
		given["timestamp"] = json.Number(strconv.FormatInt(time.Now().UnixMilli(), 10))
	}
	if event.Version == "" {
		given["version"] = "1"
	}
	if event.Data == nil {
		given["data"] = map[string]any{}
	}
	if event.Metadata != nil {
		given["metadata"] = event.Metadata
	}
	for name, text := range map[string]string{"subject": event.Subject, "dataschema": event.DataSchema} {
		if text != "" {
			var err error
			if given[name], err = filled(name, text, 1000); err != nil {
				return nil, err
			}
		}
	}
	made, err := checked(given)
	if err != nil {
		return nil, err
	}
	value, err := encode(made)
	if err != nil {
		return nil, err
	}
	record := &kgo.Record{Topic: topic, Key: []byte(made.Key()), Value: value}
	correlation, _ := made.Metadata["correlationId"].(string)
	for _, header := range [][2]string{
		{"content-type", "application/json"}, {"event-id", made.ID}, {"event-type", made.Type},
		{"event-source", made.Source}, {"event-version", made.Version}, {"correlation-id", correlation},
	} {
		if header[1] != "" {
			record.Headers = set(record.Headers, header[0], []byte(header[1]))
		}
	}
	return record, nil
}

// ReadEvent reads an event; nil for one of a type that is not handled, valid or not, and a *Refused
// if it cannot be read. Handled has the versions that are understood of each type.
func ReadEvent(record *kgo.Record, handled map[string][]string) (*Event, error) {
	if record.Value == nil {
		return nil, &Refused{"invalid", "The event has no value"}
	}
	found, err := decode(record.Value)
	if err != nil {
		return nil, err
	}
	given, isObject := found.(map[string]any)
	if !isObject {
		return nil, &Refused{"invalid", "An event must be an object"}
	}
	kind, _ := given["type"].(string)
	versions, isHandled := handled[kind]
	if kind != "" && !isHandled {
		return nil, nil
	}
	event, err := checked(given)
	if err != nil {
		return nil, err
	}
	for _, version := range versions {
		if version == event.Version {
			return event, nil
		}
	}
	return nil, &Refused{"invalid", "Version " + event.Version + " of " + kind + " is not understood here"}
}

func checked(given map[string]any) (*Event, error) {
	event := &Event{Version: "1"}
	var err error
	for _, field := range []struct {
		name  string
		limit int
		place *string
	}{{"id", 255, &event.ID}, {"type", 100, &event.Type}, {"source", 100, &event.Source}} {
		if *field.place, err = filled(field.name, given[field.name], field.limit); err != nil {
			return nil, err
		}
	}
	timestamp, _ := given["timestamp"].(json.Number)
	moment, err := timestamp.Float64()
	if err != nil || moment != math.Trunc(moment) || moment <= 0 || moment > 253402300799999 {
		return nil, &Refused{"invalid", "timestamp must be milliseconds of Unix time"}
	}
	event.Timestamp = int64(moment)
	if given["version"] != nil {
		if event.Version, err = version(given["version"]); err != nil {
			return nil, err
		}
	}
	var isObject bool
	if event.Data, isObject = given["data"].(map[string]any); !isObject {
		return nil, &Refused{"invalid", "data must be an object"}
	}
	// Readers of version 1.0 ignored these two whatever they held.
	event.Subject, _ = filled("subject", given["subject"], 1000)
	event.DataSchema, _ = filled("dataschema", given["dataschema"], 1000)
	if given["metadata"] != nil {
		event.Metadata, err = metadata(given["metadata"])
	}
	return event, err
}

func filled(name string, value any, limit int) (string, error) {
	text, _ := value.(string)
	isEmpty := strings.TrimSpace(text) == ""
	if isEmpty || strings.Contains(text, "\x00") || utf8.RuneCountInString(text) > limit {
		return "", &Refused{"invalid", fmt.Sprintf("%s must be text of 1 to %d characters", name, limit)}
	}
	return text, nil
}

var (
	numbered = regexp.MustCompile(`^[vV]?(\d+(?:\.\d+)*)$`)
	zeros    = regexp.MustCompile(`(?:\.0+)+$`)
)

// version returns a version as it is compared: 1, "1", "v1" and "1.0" are equal.
func version(given any) (string, error) {
	if number, isNumber := given.(json.Number); isNumber {
		given = number.String()
	}
	text, err := filled("version", given, 50)
	text = strings.TrimSpace(text)
	if digits := numbered.FindStringSubmatch(text); digits != nil {
		return zeros.ReplaceAllString(digits[1], ""), err
	}
	return text, err
}

func metadata(given any) (map[string]any, error) {
	object, isObject := given.(map[string]any)
	if !isObject {
		return nil, &Refused{"invalid", "metadata must be an object"}
	}
	found := map[string]any{}
	for name, value := range object {
		found[name] = value
	}
	for _, names := range [][2]string{
		{"correlationId", "correlation_id"}, {"causationId", "causation_id"}, {"userId", "user_id"},
	} {
		value := asText(either(object, names[0], names[1]))
		delete(found, names[0])
		delete(found, names[1])
		if value != nil {
			text, err := filled("metadata."+names[0], value, 255)
			if err != nil {
				return nil, err
			}
			found[names[0]] = text
		}
	}
	return found, nil
}

func either(given map[string]any, camel, snake string) any {
	if value := given[camel]; value != nil {
		return value
	}
	return given[snake]
}

// asText returns a whole number as text: ids are often numbers.
func asText(value any) any {
	switch value := value.(type) {
	case int, int64:
		return fmt.Sprint(value)
	case json.Number:
		if _, err := value.Int64(); err == nil {
			return value.String()
		}
	}
	return value
}

func newID() string {
	random := make([]byte, 16)
	if _, err := rand.Read(random); err != nil {
		panic(err)
	}
	return fmt.Sprintf("%x", random)
}

// --- KDLQ ----------------------------------------------------------------------------------------

// Answer is what a processor says of a record.
type Answer string

const (
	OK                Answer = "OK"
	MustBeRedelivered Answer = "MUST_BE_REDELIVERED"
	Error             Answer = "ERROR"
)

// Config says how records are routed.
type Config struct {
	Consumer             string
	DlqTopic             string
	RedeliveryTopic      string // empty: the topic of the record
	MaxRedeliveries      int    // -1: no limit
	MaxKills             int    // -1: no limit
	InformationalHeaders bool
}

// Failure is told of in a dead letter.
type Failure struct{ Class, Message string }

// Accept processes a record and returns what becomes of it, as Decide does. An error of the processor
// kills the record.
func Accept(record *kgo.Record, process func(*kgo.Record) (Answer, error), config Config) (string, *kgo.Record) {
	answer, err := process(record)
	if err != nil {
		return Decide(record, Error, config, &Failure{fmt.Sprintf("%T", err), err.Error()}, time.Now())
	}
	return Decide(record, answer, config, nil, time.Now())
}

// Decide returns what becomes of a record that was answered like this: its status, and the record to
// send before the offset is committed, or nil.
func Decide(record *kgo.Record, answer Answer, config Config, failure *Failure, now time.Time) (string, *kgo.Record) {
	redelivered, kills := Counter(record, "KDLQ_Redelivered"), Counter(record, "KDLQ_Kills")
	if answer == OK {
		return "OK", nil
	}
	sent := &kgo.Record{Topic: config.DlqTopic, Key: record.Key, Value: record.Value}
	sent.Headers = kept(record, config)
	isAllowed := config.MaxRedeliveries < 0 || redelivered < config.MaxRedeliveries
	if answer == MustBeRedelivered && isAllowed {
		if sent.Topic = config.RedeliveryTopic; sent.Topic == "" {
			sent.Topic = record.Topic
		}
		sent.Headers = set(sent.Headers, "KDLQ_Redelivered", counted(redelivered))
		return "REDELIVERED", sent
	}
	if 0 <= config.MaxKills && config.MaxKills <= kills {
		return "SKIPPED_DLQ_MAX_ATTEMPTS_REACHED", nil
	}
	sent.Headers = set(sent.Headers, "KDLQ_Kills", counted(kills))
	sent.Headers = set(sent.Headers, "KDLQ_FailedAt", long(now.UnixMilli()))
	sent.Headers = without(without(sent.Headers, "KDLQ_ErrorClass"), "KDLQ_ErrorMessage")
	if failure != nil {
		message := []rune(failure.Message)
		if len(message) > 500 {
			message = message[:500]
		}
		sent.Headers = set(sent.Headers, "KDLQ_ErrorClass", []byte(failure.Class))
		sent.Headers = set(sent.Headers, "KDLQ_ErrorMessage", []byte(string(message)))
	}
	return "ROUTED_TO_DLQ", sent
}

// Counter returns a counter of KDLQ; what is no number of four bytes, or negative, counts as 0.
func Counter(record *kgo.Record, name string) int {
	value, _ := header(record, name)
	if len(value) != 4 {
		return 0
	}
	if count := int32(binary.BigEndian.Uint32(value)); count > 0 {
		return int(count)
	}
	return 0
}

// kept returns the record's headers, with what tells of the origin where that is not there yet.
func kept(record *kgo.Record, config Config) []kgo.RecordHeader {
	origin := []kgo.RecordHeader{{Key: "KDLQ_OrigTopic", Value: []byte(record.Topic)}}
	if config.InformationalHeaders {
		origin = append(origin,
			kgo.RecordHeader{Key: "KDLQ_OrigOffset", Value: long(record.Offset)},
			kgo.RecordHeader{Key: "KDLQ_OrigPartition", Value: integer(int(record.Partition))},
			kgo.RecordHeader{Key: "KDLQ_OrigTs", Value: long(record.Timestamp.UnixMilli())})
	}
	headers := append([]kgo.RecordHeader{}, record.Headers...)
	for _, one := range origin {
		if _, isThere := header(record, one.Key); !isThere {
			headers = append(headers, one)
		}
	}
	return set(headers, "KDLQ_PrcMarker", []byte(config.Consumer))
}

func counted(count int) []byte {
	if count == math.MaxInt32 {
		return integer(count)
	}
	return integer(count + 1)
}

func integer(value int) []byte {
	return binary.BigEndian.AppendUint32(nil, uint32(value))
}

func long(value int64) []byte {
	return binary.BigEndian.AppendUint64(nil, uint64(value))
}

// --- Headers and JSON ----------------------------------------------------------------------------

// header returns the value of a header. Of a name given more than once the last counts.
func header(record *kgo.Record, name string) (value []byte, isThere bool) {
	for _, one := range record.Headers {
		if one.Key == name {
			value, isThere = one.Value, true
		}
	}
	return value, isThere
}

func without(headers []kgo.RecordHeader, name string) []kgo.RecordHeader {
	var left []kgo.RecordHeader
	for _, one := range headers {
		if one.Key != name {
			left = append(left, one)
		}
	}
	return left
}

func set(headers []kgo.RecordHeader, name string, value []byte) []kgo.RecordHeader {
	return append(without(headers, name), kgo.RecordHeader{Key: name, Value: value})
}

func text(record *kgo.Record, name, otherwise string) string {
	value, isThere := header(record, name)
	if !isThere {
		return otherwise
	}
	return strings.ToValidUTF8(string(value), "\uFFFD")
}

func number(record *kgo.Record, name string, otherwise int) int {
	found, err := strconv.ParseUint(text(record, name, ""), 10, 31)
	if err != nil {
		return otherwise
	}
	return int(found)
}

func identifier(record *kgo.Record, name string, limit int) (string, error) {
	value, _ := header(record, name)
	found := string(value)
	switch {
	case found == "":
		return "", &Refused{"invalid", "The message has no " + name + " header"}
	case !utf8.Valid(value):
		return "", &Refused{"invalid", "The " + name + " header is not valid UTF-8"}
	case utf8.RuneCountInString(found) > limit || strings.Contains(found, "\x00"):
		return "", &Refused{"invalid", "The " + name + " header is not a usable identifier"}
	}
	return found, nil
}

func encode(value any) ([]byte, error) {
	var written bytes.Buffer
	encoder := json.NewEncoder(&written)
	encoder.SetEscapeHTML(false)
	err := encoder.Encode(value)
	return bytes.TrimSpace(written.Bytes()), err
}

func decode(value []byte) (found any, err error) {
	if !utf8.Valid(value) {
		return nil, &Refused{"deserialization", "Not valid UTF-8"}
	}
	decoder := json.NewDecoder(bytes.NewReader(value))
	decoder.UseNumber()
	if err = decoder.Decode(&found); err == nil {
		if _, err = decoder.Token(); err == io.EOF {
			return found, nil
		}
		err = fmt.Errorf("data after the value")
	}
	return nil, &Refused{"deserialization", err.Error()}
}
