// go run ./payments TOPIC REDELIVERY_TOPIC DEAD_LETTER_TOPIC CONSUMER_GROUP
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"os"

	"example.com/kjo"
	"github.com/twmb/franz-go/pkg/kgo"
)

func main() {
	from, again, dlq, group := os.Args[1], os.Args[2], os.Args[3], os.Args[4]
	config := kjo.Config{Consumer: group, RedeliveryTopic: again, DlqTopic: dlq, MaxRedeliveries: 4, MaxKills: 3}
	client, err := kjo.Consume(group, from, dlq)
	// Commits after what was sent, so that a crash loses nothing.
	for ctx := context.Background(); err == nil; err = client.CommitUncommittedOffsets(ctx) {
		for _, record := range client.PollFetches(ctx).Records() {
			status, sent := kjo.Accept(record, book, config)
			if sent != nil {
				if err := client.ProduceSync(ctx, sent).FirstErr(); err != nil {
					log.Fatal(err)
				}
			}
			fmt.Println(status, string(record.Key))
		}
	}
	log.Fatal(err)
}

func book(record *kgo.Record) (kjo.Answer, error) {
	var payment struct{ State string }
	err := json.Unmarshal(record.Value, &payment)
	switch {
	case payment.State == "unknown":
		return kjo.Error, errors.New("no such account") // kills it
	case payment.State == "pending":
		return kjo.MustBeRedelivered, err
	}
	return kjo.OK, err
}
